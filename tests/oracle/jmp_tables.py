"""Prints what jmp answers: the tables in tests/regions/policy/text.rs and tests/steps/loss_scale/dynamic.rs.

No test runs it. In an environment of its own: `pip install jmp jax`, then `python jmp_tables.py`.
"""

import jax.numpy as jnp
import jmp

POLICIES = """full half f16 float16 bf16 bfloat16 f32 float32 f64 float64 c=f16 c=bf16 p=f16 o=f16 p=f16,c=f16 p=f16,c=bf16
p=bf16,o=f32 c=f16,o=f32 params=float32,compute=float16,output=float32 params=float64,compute=float32
o=f32,c=f16,p=bf16 params=full,compute=half,output=full compute=half output=f16,params=bf16 p=full,c=bf16,o=full""".split()

# First scale, steps (a dot has finite gradients), period, factor, minimum.
PROGRAMS = [
    (32768.0, "....!.!!....", 2, 2, 1.0),
    (8.0, "!!!!!..", 1, 2, 1.0),
    (8.0, "......!!!!.", 3, 4, 2.0),
    (2.0**127, "..!..", 1, 2, 1.0),
    (10.0, "!!!!....", 2, 3, 0.5),
    (1000.0, "..!!!....!.....!!!..", 3, 3, 1.0),
    (6.0, "!.", 1, 2, 4.0),
]


def steps(scale, program, period, factor, minimum):
    f32 = lambda number: jnp.asarray(number, jnp.float32)
    state = jmp.DynamicLossScale(f32(scale), period=period, factor=factor, min_loss_scale=f32(minimum))
    for step in program:
        state = state.adjust(jnp.asarray(step == "."))
        yield f"{step} {float(state.loss_scale)} {int(state.counter)}"


for text in POLICIES:
    policy = jmp.get_policy(text)
    print(text, *(kind.__name__ for kind in (policy.param_dtype, policy.compute_dtype, policy.output_dtype)))
for program in PROGRAMS:
    print(program, ", ".join(steps(*program)))
for kind in (jnp.float16, jnp.bfloat16, jnp.float32):
    ones, scale = jnp.ones(1, kind), jmp.StaticLossScale(jnp.asarray(8.0, jnp.float32))
    print(kind.__name__, "is scaled to", scale.scale(ones).dtype, "and unscaled to", scale.unscale(ones).dtype)
