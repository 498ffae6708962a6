"""Graph rewrites: one pass a file, which declares its stage (`chipfit.registry.Step`); `chipfit.steps` runs them.

A note is one line that names a rewrite, or a refusal and its reason; notes are stored in `Plan.rewrites`. The graph is
checked after every pass, so that an error names the pass that broke the graph.
"""
