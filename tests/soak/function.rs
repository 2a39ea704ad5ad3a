//! Many applications of a custom function do not increase the memory. This is a program of its own, because the memory
//! of other tests would be measured, too.

use tch::Tensor;
use tch_amp::function;

use testkit::{is_set, resident_bytes};

/// Even in the short run, a leak of six bytes per application exceeds this.
const MAX_BYTES: u64 = 1 << 20;

/// `TCH_AMP_LONG=1` runs a million applications.
#[test]
fn applications_keep_memory_flat() {
    if resident_bytes().is_none() {
        return;
    }
    tch::set_num_threads(1);
    let applications = if is_set("TCH_AMP_LONG") { 1_000_000 } else { 200_000 };
    let x = Tensor::from_slice(&[0.5, 1.0]).set_requires_grad(true);
    run(&x, applications / 10);
    let before = resident_bytes().unwrap();
    run(&x, applications);
    let grown = resident_bytes().unwrap().saturating_sub(before);
    println!("{applications} applications left {grown} bytes");
    assert!(grown < MAX_BYTES, "{applications} applications left {grown} bytes");
}

/// Of every three graphs, one is run, one is run twice, and one is dropped without a backward.
fn run(x: &Tensor, count: usize) {
    for i in 0..count {
        let exp = function(
            |ctx, x| {
                let y = x[0].exp();
                ctx.save_for_backward(&[x[0], &y]);
                ctx.save_value((y.shallow_clone(), vec![0u8; 1000]));
                Ok(y)
            },
            |ctx, g| {
                let [_, y] = ctx.saved_tensors()?;
                Ok(&g[0] * y)
            },
        );
        let y = exp.apply(&[x]).unwrap().sum(None);
        for run in 0..i % 3 {
            let _grads = Tensor::run_backward(&[&y], &[x], run == 0 && i % 3 == 2, false);
        }
    }
}
