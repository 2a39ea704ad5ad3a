//! The examples with options take a few steps on each of the two GPUs, of which the second is never the current one.

#[path = "../../examples/matmul.rs"]
#[allow(dead_code, reason = "the tests choose the device")]
mod matmul;

use crate::common::simulation::Simulation;
use crate::training::GPUS;

#[test]
fn custom_functions_run_in_the_dtype_of_the_region() {
    let Some(_simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        matmul::run(gpu).unwrap();
    }
}
