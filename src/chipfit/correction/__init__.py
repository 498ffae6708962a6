"""Statistical corrections: what rounding changed on average is given back in weights and biases. One correction a file.

Each is registered where it stands (`chipfit.registry.Step`) and taken after the plan is made. Biases are changed, so
every linear operator gets one first: `passes.add_missing_bias`.
"""
