//! The guide: what to do, what to expect, and what went wrong. The pages are those of `docs/` in the repository, and
//! their code is compiled and run.

// The links of a page, and of the README on the front page of this documentation, are made once for all of them, in
// guide/links.md. Its definitions come first and therefore win over those at the end of a page, which lead to the files
// of the repository.

#[doc = include_str!("guide/links.md")]
/// The training loop: clipping, accumulation, several losses, threads, and what to watch for.
#[doc = ""]
#[doc = include_str!("../docs/training.md")]
pub mod training {}

#[doc = include_str!("guide/links.md")]
/// Fused optimizers: parameter groups, clipping in the step, schedules.
#[doc = ""]
#[doc = include_str!("../docs/optimizers.md")]
pub mod optimizers {}

#[doc = include_str!("guide/links.md")]
/// Parameters in bf16 or fp16, and master weights.
#[doc = ""]
#[doc = include_str!("../docs/half_parameters.md")]
pub mod half_parameters {}

#[doc = include_str!("guide/links.md")]
/// Policies, levels and functional loss scales.
#[doc = ""]
#[doc = include_str!("../docs/policies.md")]
pub mod policies {}

#[doc = include_str!("guide/links.md")]
/// Saving and resuming a run, and files shared with Python.
#[doc = ""]
#[doc = include_str!("../docs/checkpoints.md")]
pub mod checkpoints {}

#[doc = include_str!("guide/links.md")]
/// Operations with a forward and a backward of your own.
#[doc = ""]
#[doc = include_str!("../docs/functions.md")]
pub mod functions {}

#[doc = include_str!("guide/links.md")]
/// Which operation runs in which dtype, on the CPU and on CUDA.
#[doc = ""]
#[doc = include_str!("../docs/operations.md")]
pub mod operations {}

#[doc = include_str!("guide/links.md")]
/// The range and precision of f32, bf16 and fp16, and what loss scaling does.
#[doc = ""]
#[doc = include_str!("../docs/number_formats.md")]
pub mod number_formats {}

#[doc = include_str!("guide/links.md")]
/// libtorch's and this crate's messages, their causes and their remedies.
#[doc = ""]
#[doc = include_str!("../docs/errors.md")]
pub mod errors {}

#[doc = include_str!("guide/links.md")]
/// Where the crate differs from PyTorch, from jmp and from tch's own `autocast`.
#[doc = ""]
#[doc = include_str!("../docs/differences.md")]
pub mod differences {}

#[doc = include_str!("guide/links.md")]
/// What the crate guarantees, and how it is tested.
#[doc = ""]
#[doc = include_str!("../docs/guarantees.md")]
pub mod guarantees {}
