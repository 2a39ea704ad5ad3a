//! The guide: how to train in mixed precision, which results to expect, and how to resolve errors.
//!
//! The pages are those of the folder `docs/` in the repository. Their code is compiled as tests, and most of it is run.
//!
#![doc = include_str!("guide/links.md")]
//!
//! | | |
//! |---|---|
//! | **Start** | the [tutorial] step by step; [recipes], an example for each need; [porting] from Python; [tch's examples] converted; a [CUDA libtorch][libtorch] |
//! | **Train** | [training] loops; [losses written by hand][losses]; [less memory]; [optimizers]; [low-bit moments]; [half-precision parameters]; [policies and loss scales]; [checkpoints]; [several devices]; [custom functions]; [graphs] |
//! | **Understand** | [insight] into a model; [precision budgets]; [number formats]; [operations] and their dtypes; [calls that synchronize][synchronization]; NVIDIA's [guide of training with mixed precision][nvidia] |
//! | **Look up** | [common errors]; [differences] from PyTorch; [guarantees]; [measurements][docs/measurements]; [changes][CHANGELOG.md]; [contributing][CONTRIBUTING.md] |

// guide/links.md defines the links of all pages and of the README. It is included first, so that its definitions take
// precedence over those at the end of a page, which link to files of the repository.

#[cfg(feature = "insight")]
#[doc = include_str!("guide/links.md")]
/// From a training loop in f32 to one in half precision that clips, resumes and is explained, step by step.
#[doc = ""]
#[doc = include_str!("../docs/tutorial.md")]
pub mod tutorial {}

#[doc = include_str!("guide/links.md")]
/// From a loop in f32 to mixed precision, and to the example for each further need.
#[doc = ""]
#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {}

#[doc = include_str!("guide/links.md")]
/// A Python program that trains with `torch.amp`, and the same program in Rust.
#[doc = ""]
#[doc = include_str!("../docs/porting.md")]
pub mod porting {}

#[doc = include_str!("guide/links.md")]
/// Converting the examples of tch: mnist, cifar, min-gpt, gan and transfer-learning, and notes on the others.
#[doc = ""]
#[doc = include_str!("../docs/tch_examples.md")]
pub mod tch_examples {}

#[doc = include_str!("guide/links.md")]
/// Which libtorch has CUDA, which variables it needs, and how to see that a program uses the GPU.
#[doc = ""]
#[doc = include_str!("../docs/libtorch.md")]
pub mod libtorch {}

#[doc = include_str!("guide/links.md")]
/// The training loop: gradient clipping, gradient accumulation, several losses, threads, and pitfalls.
#[doc = ""]
#[doc = include_str!("../docs/training.md")]
pub mod training {}

#[doc = include_str!("guide/links.md")]
/// Losses that a program writes itself: in which region each is safe, and what to write instead.
#[doc = ""]
#[doc = include_str!("../docs/losses.md")]
pub mod losses {}

#[doc = include_str!("guide/links.md")]
/// What takes the memory of an iteration, and losses, layers and blocks that keep less of it.
#[doc = ""]
#[doc = include_str!("../docs/memory.md")]
pub mod memory {}

#[doc = include_str!("guide/links.md")]
/// Iterations that are captured as a CUDA graph and replayed: what they may do, and what is noticed.
#[doc = ""]
#[doc = include_str!("../docs/graphs.md")]
pub mod graphs {}

#[doc = include_str!("guide/links.md")]
/// Optimizer moments in bf16 or 8 bits: what they save, what they cost, and how they are encoded.
#[doc = ""]
#[doc = include_str!("../docs/low_bit_moments.md")]
pub mod low_bit_moments {}

#[doc = include_str!("guide/links.md")]
/// Fused optimizers: parameter groups, clipping in the step, and learning-rate schedules.
#[doc = ""]
#[doc = include_str!("../docs/optimizers.md")]
pub mod optimizers {}

#[doc = include_str!("guide/links.md")]
/// Which calls make the host wait for a GPU, and what to write instead.
#[doc = ""]
#[doc = include_str!("../docs/synchronization.md")]
pub mod synchronization {}

#[doc = include_str!("guide/links.md")]
/// Parameters in bf16 or fp16, and master weights.
#[doc = ""]
#[doc = include_str!("../docs/half_parameters.md")]
pub mod half_parameters {}

#[doc = include_str!("guide/links.md")]
/// Precision policies, the levels `O0` to `O3`, and functional loss scales.
#[doc = ""]
#[doc = include_str!("../docs/policies.md")]
pub mod policies {}

#[doc = include_str!("guide/links.md")]
/// Saving and resuming a training run, and exchanging files with Python.
#[doc = ""]
#[doc = include_str!("../docs/checkpoints.md")]
pub mod checkpoints {}

#[doc = include_str!("guide/links.md")]
/// Custom autograd functions: operations with a forward and a backward of your own.
#[doc = ""]
#[doc = include_str!("../docs/functions.md")]
pub mod functions {}

#[cfg(feature = "distributed")]
#[doc = include_str!("guide/links.md")]
/// Data-parallel training on several devices, processes or threads.
#[doc = ""]
#[doc = include_str!("../docs/distributed.md")]
pub mod distributed {}

#[cfg(feature = "insight")]
#[doc = include_str!("guide/links.md")]
/// Why a step was skipped, what half precision does to the numbers of a model, why it is not faster, and whether the
/// loss scale is healthy.
#[doc = ""]
#[doc = include_str!("../docs/insight.md")]
pub mod insight {}

#[cfg(feature = "insight")]
#[doc = include_str!("guide/links.md")]
/// A test that half precision does no more to a training loop than rounding.
#[doc = ""]
#[doc = include_str!("../docs/budgets.md")]
pub mod budgets {}

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
/// Error messages of libtorch and of this crate, with their causes and remedies.
#[doc = ""]
#[doc = include_str!("../docs/errors.md")]
pub mod errors {}

#[doc = include_str!("guide/links.md")]
/// The differences from PyTorch, from jmp and from tch's own `autocast`.
#[doc = ""]
#[doc = include_str!("../docs/differences.md")]
pub mod differences {}

#[doc = include_str!("guide/links.md")]
/// The guarantees of the crate, and what is not tested.
#[doc = ""]
#[doc = include_str!("../docs/guarantees.md")]
pub mod guarantees {}
