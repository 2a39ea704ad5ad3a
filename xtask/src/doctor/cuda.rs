//! The doctor's report about CUDA.

use std::path::Path;

use super::say;
use crate::gpu::{self, Gpu};
use crate::libtorch::Libtorch;

/// Prints what is known about CUDA, and returns the devices that libtorch can use.
pub(super) fn examine(libtorch: Option<&Libtorch>) -> Vec<Gpu> {
    let has_cuda = libtorch.map(Libtorch::has_cuda);
    match has_cuda {
        Some(true) => say("CUDA", "built into this libtorch"),
        Some(false) => say("CUDA", "not built into this libtorch: there is no libtorch_cuda.so"),
        None => {}
    }
    let python = libtorch.and_then(|libtorch| libtorch.python.as_deref());
    match python.filter(|_| has_cuda == Some(true)) {
        Some(python) => usable(python),
        None => {
            listed();
            Vec::new()
        }
    }
}

fn usable(python: &Path) -> Vec<Gpu> {
    match gpu::usable(python) {
        Ok(gpus) => {
            describe(&gpus);
            gpus
        }
        Err(error) => {
            say("", &format!("not usable here: {error:#}"));
            Vec::new()
        }
    }
}

/// Without Python's torch, the devices are the driver's, and whether libtorch can use them is unknown.
fn listed() {
    match gpu::listed() {
        Some(gpus) => {
            describe(&gpus);
            say(
                "",
                "as the driver says; whether libtorch can use it only Python's torch can tell:",
            );
            say("", "run `cargo xtask test` once without LIBTORCH, or set TCH_AMP_PYTHON");
        }
        None => say("CUDA devices", "none: nvidia-smi does not run"),
    }
}

fn describe(gpus: &[Gpu]) {
    for (index, gpu) in gpus.iter().enumerate() {
        let (major, minor) = gpu.capability;
        let speed = match (gpu.has_fast_fp16(), gpu.has_fast_bf16()) {
            (_, true) => "tensor cores for fp16 and bf16",
            (true, false) => "tensor cores for fp16, none for bf16",
            (false, false) => "no tensor cores",
        };
        say(&format!("cuda:{index}"), &format!("{}, compute {major}.{minor}: {speed}", gpu.name));
    }
}
