"""Graph rewrites: one a file, registered where it stands (`chipfit.registry.Step`), run by `chipfit.steps`.

A note is one line that says what was rewritten, or what was refused and why; notes end up in `Plan.rewrites`. The graph
is checked after every pass, so a broken graph is blamed on the pass that broke it.
"""
