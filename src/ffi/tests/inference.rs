//! Tests of custom functions in libtorch's inference mode, which tch does not bind.

use tch::Tensor;

use crate::{ffi, function};

#[test]
fn nothing_is_recorded_in_inference_mode() {
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let double = function(
        |ctx, x| {
            assert!(!ctx.needs_input_grad(0)?);
            ctx.save_for_backward(x);
            Ok(x[0] * 2.0)
        },
        |_, g| Ok(&g[0] * 2.0),
    );
    let double_ = function(
        |ctx, x| {
            ctx.mark_dirty(x);
            Ok(x[0].shallow_clone().f_mul_scalar_(2.0)?)
        },
        |_, g| Ok(&g[0] * 2.0),
    );
    ffi::testing_inference_mode(true);
    let y = double.apply(&[&x]).unwrap();
    let z = double_.apply(&[&y]).unwrap();
    let view = function(|_, x| Ok(x[0].shallow_clone()), |_, g| Ok(g[0].shallow_clone()));
    let same = view.apply(&[&z]).unwrap();
    ffi::testing_inference_mode(false);
    assert!(!y.requires_grad() && !z.requires_grad() && !same.requires_grad());
    assert_eq!(Vec::<f64>::try_from(z.shallow_clone()).unwrap(), [4.0, 8.0]);
    // Outside of inference mode, libtorch refuses to save a tensor that was created in it.
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let product = function(
        |ctx, x| {
            ctx.save_for_backward(&[x[1]]);
            Ok(x[0] * x[1])
        },
        |ctx, g| {
            let [b] = ctx.saved_tensors()?;
            Ok([Some(&g[0] * b), None])
        },
    );
    let error = product.apply(&[&x, &same]).unwrap_err().to_string();
    assert!(error.contains("Inference tensors cannot be saved for backward"), "{error}");
}
