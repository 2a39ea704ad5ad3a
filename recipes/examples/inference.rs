//! Inference in bf16: in a region, from a TorchScript file that was traced in a region, and with half the memory by a
//! policy. It compares their outputs and their speed with f32.
//!
//! `cargo run --release --example inference [FILE]`
//!
//! It uses the first GPU if there is one, and else the CPU. With a path it keeps the file there, which Python loads
//! with `torch.jit.load`. It writes a report of one HTML file.
//!
//! What Python's manual asks for before tracing, `torch.autocast(cache_enabled=False)`, `torch.jit.freeze` and
//! `torch._C._jit_set_autocast_mode(False)`, is here:
//!
//! - **No cached casts.** A cast that was made before the trace would not be part of it. The region has `cache(false)`.
//! - **Frozen.** Tracing in tch stores the weights as constants of the graph, as `torch.jit.freeze` does. They must not
//!   require gradients. The file has no parameters and stays on the device on which it was traced.
//! - **TorchScript's own autocast pass is off** where no region is open, and the casts are already part of the graph.
//!   So the module runs outside of all regions.

fn main() -> anyhow::Result<()> {
    recipes::inference::main()
}
