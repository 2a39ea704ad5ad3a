//! What a loss scale is blamed for, and the largest finite one.

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Cause, named};

use crate::insight::{Model, alone, explain};

fn largest_finite(cause: &Cause) -> f64 {
    match cause {
        Cause::Scale { largest_finite } => *largest_finite,
        cause => panic!("{cause:?}"),
    }
}

#[test]
fn values_that_a_large_scale_hides_are_the_culprit() {
    let (model, x) = Model::with_batch();
    // The derivative of the root is infinite at zero whatever the scale, which overflows elsewhere as well.
    let scale = 2f64.powi(32);
    let explanation = explain(&model.vs, Kind::Half, scale, || {
        model.loss(&x, |x| named("root", || (x.to_kind(Kind::Float) * 0.0).sqrt()))
    });
    assert_eq!(explanation.cause, Cause::Values, "{explanation}");
    let culprit = explanation.culprit.unwrap();
    assert_eq!(culprit.forward_operator.as_deref(), Some("aten::sqrt"));
}

#[test]
fn a_scale_far_above_every_finite_one_is_searched() {
    let (model, x) = Model::with_batch();
    let loss = || model.loss(&x, |x| x.to_kind(Kind::Half).to_kind(Kind::Float));
    let explanation = explain(&model.vs, Kind::Float, 2f64.powi(100), loss);
    let largest = largest_finite(&explanation.cause);
    assert!(largest >= 1.0);
    let finite = |scale| explain(&model.vs, Kind::Float, scale, loss).cause == Cause::Finite;
    assert!(finite(largest) && !finite(2.0 * largest), "{largest}");
}

#[test]
fn sparse_gradients_have_a_largest_scale() {
    let _alone = alone();
    for sparse in [false, true] {
        let vs = VarStore::new(Device::Cpu);
        let config = nn::EmbeddingConfig { sparse, ..Default::default() };
        let embedding = nn::embedding(vs.root() / "embedding", 10, 4, config);
        let ids = Tensor::from_slice(&[1i64, 2, 3]).reshape([1, 3]);
        let loss = || ids.apply(&embedding).to_kind(Kind::Half).to_kind(Kind::Float).sum(None);
        let explanation = explain(&vs, Kind::Float, 1e6, loss);
        assert_eq!(largest_finite(&explanation.cause), 32768.0, "sparse: {sparse}");
    }
}

#[test]
fn buffers_that_each_run_changes_do_not_change_the_verdict() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let weight = vs.root().ones("weight", &[4]);
    let factor = vs.root().ones_no_train("factor", &[1]);
    let loss = || {
        drop(tch::no_grad(|| factor.shallow_clone().g_mul_scalar_(256.0)));
        (&weight * &factor).to_kind(Kind::Half).to_kind(Kind::Float).sum(None)
    };
    let explanation = explain(&vs, Kind::Float, 65536.0, loss);
    assert_eq!(largest_finite(&explanation.cause), 32768.0, "{explanation}");
    assert_eq!(factor.double_value(&[0]), 1.0);
}
