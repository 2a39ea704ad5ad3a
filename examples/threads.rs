//! Autocast in worker threads. The autocast state belongs to a thread: a worker enters the state that its parent has
//! captured.
//!
//! `cargo run --example threads`

use std::thread;

use tch::{Device, Kind, Tensor};
use tch_amp::Autocast;
use tch_amp::autocast::AutocastState;

/// Returns the dtype of a matrix product of two f32 matrices on this thread.
fn matmul_kind(xs: &Tensor) -> Kind {
    xs.matmul(xs).kind()
}

/// Multiplies matrices on three threads.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let xs = Tensor::randn([8, 8], (Kind::Float, device));
    let autocast = Autocast::new(device).dtype(Kind::BFloat16);

    let (here, state) = autocast.run(|| (matmul_kind(&xs), AutocastState::current()))?;
    let state = state?;

    let copy = xs.shallow_clone();
    let fresh = thread::spawn(move || matmul_kind(&copy));
    let worker = thread::spawn(move || {
        let entered = state.run(|| matmul_kind(&xs));
        (entered, matmul_kind(&xs))
    });

    let panicked = |_| anyhow::anyhow!("a worker panicked");
    let fresh = fresh.join().map_err(panicked)?;
    let (entered, after) = worker.join().map_err(panicked)?;
    let entered = entered?;
    println!("here {here:?}, fresh thread {fresh:?}, worker {entered:?}, afterwards {after:?}");
    anyhow::ensure!(here == Kind::BFloat16 && entered == Kind::BFloat16);
    anyhow::ensure!(fresh == Kind::Float && after == Kind::Float);
    Ok(())
}
