//! An explanation changes nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Cause, Tracer};
use tch_amp::{Error, GradScaler};

use crate::insight::{Model, alone, batch};
use testkit::assert_refused;
use testkit::tensors::variables;

#[test]
fn gradients_buffers_and_random_numbers_are_put_back() {
    let _alone = alone();
    tch::manual_seed(1);
    let vs = VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root() / "norm", 4, Default::default());
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut tracer = Tracer::new(&vs).unwrap();
    let x = batch();
    let masks = std::cell::RefCell::new(Vec::new());
    let loss = || {
        let mask = Tensor::rand([2, 4], (Kind::Float, Device::Cpu));
        masks.borrow_mut().push(mask.shallow_clone());
        (x.apply_t(&norm, true) * mask * 1e38).square().sum(None)
    };
    tracer.begin(&scaler).unwrap();
    scaler.backward(&loss()).unwrap();
    let state = || {
        let tensors = variables(&vs).into_values().flat_map(|tensor| {
            let gradient = tensor.grad();
            [Some(tensor.copy()), gradient.defined().then(|| gradient.copy())]
        });
        tensors.collect::<Vec<_>>()
    };
    let same = |a: &[Option<Tensor>], b: &[Option<Tensor>]| {
        a.iter().zip(b).all(|(a, b)| match (a, b) {
            (Some(a), Some(b)) => a.nan_to_num(7.0, 8.0, 9.0) == b.nan_to_num(7.0, 8.0, 9.0),
            (a, b) => a.is_none() && b.is_none(),
        })
    };
    let before = state();
    let handle = vs.variables()["norm.weight"].grad();
    tch::manual_seed(5);
    let next = Tensor::rand([3], (Kind::Float, Device::Cpu));
    tch::manual_seed(5);
    let explanation = tracer.explain(&scaler, || Ok(loss())).unwrap().unwrap();
    assert_ne!(explanation.cause, Cause::Finite);
    assert!(same(&before, &state()));
    // The same tensor, not a copy of it.
    assert_eq!(handle.data_ptr(), vs.variables()["norm.weight"].grad().data_ptr());
    assert_eq!(next, Tensor::rand([3], (Kind::Float, Device::Cpu)));
    let masks = masks.into_inner();
    assert!(masks.len() > 1 && masks.iter().all(|mask| *mask == masks[0]));
}

#[test]
fn a_panic_leaves_no_callback_behind() {
    let model = Model::new();
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut tracer = Tracer::new(&model.vs).unwrap();
    tracer.begin(&scaler).unwrap();
    let x = batch();
    model.loss(&x, Tensor::shallow_clone).backward();
    let gradient = model.vs.variables()["layers.0.weight"].grad().copy();
    // As many as could run at the same time, and more.
    for _ in 0..20 {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            tracer.explain(&scaler, || {
                let _loss = model.loss(&x, Tensor::shallow_clone);
                panic!("planted")
            })
        }));
        assert!(panicked.is_err());
    }
    assert_eq!(gradient, model.vs.variables()["layers.0.weight"].grad());
    let explanation =
        tracer.explain(&scaler, || Ok(model.loss(&x, Tensor::shallow_clone))).unwrap().unwrap();
    assert_eq!(explanation.cause, Cause::Finite);
}

#[test]
fn a_limit_is_kept_and_an_iteration_must_have_begun() {
    let model = Model::new();
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let x = batch();
    let loss = || Ok(model.loss(&x, Tensor::shallow_clone));
    let mut tracer = Tracer::new(&model.vs).unwrap().limit(1);
    assert_refused!(tracer.explain(&scaler, loss), Error::InvalidArgument { name: "tracer", .. });
    tracer.begin(&scaler).unwrap();
    // An error of the closure does not count.
    let failed = tracer.explain(&scaler, || Err(Error::Torch("mine".to_owned())));
    assert!(failed.unwrap_err().to_string().contains("mine"));
    assert!(tracer.explain(&scaler, loss).unwrap().is_some());
    assert!(tracer.explain(&scaler, loss).unwrap().is_none());
}

#[test]
fn gradients_of_another_model_are_put_back_and_can_be_the_reason() {
    let (model, x) = Model::with_batch();
    let others = VarStore::new(Device::Cpu);
    let used = others.root().ones("used", &[4]);
    let unused = others.root().ones("unused", &[4]);
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut tracer = Tracer::new(&model.vs).unwrap();
    tracer.begin(&scaler).unwrap();
    scaler.backward(&model.loss(&x, |x| x * &used)).unwrap();
    let before = used.grad().copy();
    // Only the gradient of the other model overflows, because of the scale.
    let loss = || Ok(model.loss(&x, Tensor::shallow_clone) + ((&used - 1.0) * 1e36).sum(None));
    let finite = || Ok(model.loss(&x, Tensor::shallow_clone) + (&unused * 2.0).sum(None));
    let explanation = tracer.explain(&scaler, loss).unwrap().unwrap();
    assert!(matches!(explanation.cause, Cause::Scale { .. }), "{explanation}");
    assert_eq!(tracer.explain(&scaler, finite).unwrap().unwrap().cause, Cause::Finite);
    assert_eq!(used.grad(), before);
    assert!(!unused.grad().defined());
}

#[test]
fn gradients_of_other_leaves_are_put_back_wherever_they_are_in_the_graph() {
    let model = Model::new();
    let parameter = model.vs.variables()["layers.0.weight"].shallow_clone();
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut tracer = Tracer::new(&model.vs).unwrap();
    for order in [[0, 1, 2], [1, 0, 2], [1, 2, 0]] {
        let others =
            [(); 2].map(|()| testkit::tensors::leaf(&[1.0, 2.0], Kind::Float, Device::Cpu));
        for other in &others {
            (other * 3.0).sum(Kind::Float).backward();
        }
        let parts = [&parameter, &others[0], &others[1]];
        let loss = || order.iter().map(|&i| (parts[i] * 2.0).sum(Kind::Float)).sum::<Tensor>();
        tracer.begin(&scaler).unwrap();
        let explanation = tracer.explain(&scaler, || Ok(loss())).unwrap().unwrap();
        assert_eq!(explanation.cause, Cause::Finite);
        for other in &others {
            assert_eq!(other.grad(), Tensor::from_slice(&[3f32, 3.0]), "{order:?}");
        }
        assert!(!parameter.grad().defined());
    }
}
