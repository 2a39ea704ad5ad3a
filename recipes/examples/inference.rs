//! Inference in bf16: in a region, from a TorchScript file that was traced in a region, and with half the memory by a
//! policy. It compares their outputs and their speed with f32.
//!
//! `cargo run --release --example inference [FILE]`
//!
//! It uses the first GPU if there is one, and else the CPU. With a path it keeps the file there, which Python loads
//! with `torch.jit.load`. It writes a report of one HTML file.
//!
//! What Python's manual does for TorchScript, `torch._C._jit_set_autocast_mode(False)`,
//! `torch.autocast(cache_enabled=False)` and `torch.jit.freeze`, is here:
//!
//! - **TorchScript's own autocast pass is off**: `jit::set_autocast_mode(false)`. The casts are part of the trace, and
//!   need no others.
//! - **No cached casts.** A cast that was made before the trace would not be part of it. The region has `cache(false)`.
//! - **Frozen.** `jit::freeze` makes the weights constants of the graph, which tracing in tch has done already, and
//!   optimizes the graph. The weights must not require gradients. The file has no parameters and stays on the device on
//!   which it was traced.

fn main() -> anyhow::Result<()> {
    recipes::inference::main()
}
