"""Statistical corrections: what rounding changed on average is given back in biases. One correction a file.

Each is a function `(graph, plan, what was measured) -> (graph, notes)` to be applied after the plan is made. Biases are
changed, so every operator that is to gain needs one: `give_biases`.
"""
