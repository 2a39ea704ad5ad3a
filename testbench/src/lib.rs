//! What stands for GPUs where there are none: [simulated GPUs](simulated_cuda), and [null CUDA](null_cuda), the real host
//! code of libtorch on stand-ins for the libraries of CUDA. `cargo xtask` runs programs and tests on them.
#![allow(
    clippy::missing_errors_doc,
    reason = "`cargo xtask` shows each error as it is, and tells none apart"
)]

pub mod cache;
pub mod compiled;
pub mod compiler;
pub mod libtorch;
pub mod null_cuda;
pub mod paths;
pub mod process;
pub mod simulated_cuda;
