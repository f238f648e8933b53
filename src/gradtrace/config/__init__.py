"""Every setting of a run, typed, with its meaning under it.

`root` has the sections, `loader` reads recipes and overrides, `keys` checks names and values. A section's settings
stand with the code that they are for. `gradtrace train KEY=VALUE …` overrides any of them by its path
(`actor.optim.lr=1e-6`); a recipe (`conf/NAME.yaml`, chosen with `recipe=NAME`) is a set of such values.
"""
