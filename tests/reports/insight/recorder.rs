//! What a recording must not mistake: shared storages, stale counts, and the errors of closures.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Cause, Tracer, named};
use tch_amp::{Error, GradScaler};

use crate::insight::{Model, alone, batch, explain, explain_planted};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn parameters_of_one_storage_keep_their_names() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let mut a = (vs.root() / "a").ones("weight", &[4]);
    let mut b = (vs.root() / "b").ones("weight", &[4]);
    let flat = Tensor::from_slice(&[1f32, 1., 1., 1., 1., f32::INFINITY, 1., 1.]);
    a.set_data(&flat.narrow(0, 0, 4));
    b.set_data(&flat.narrow(0, 4, 4));
    let loss = || (&a * 2.0).sum(None) + (&b * 2.0).sum(None);
    let explanation = explain(&vs, Kind::Float, 1.0, loss);
    assert_eq!(explanation.cause, Cause::Parameter { name: "b.weight".to_owned() });
}

#[test]
fn numbers_that_the_closure_brings_are_an_input() {
    let explanation = explain_planted(|x| x - Tensor::from_slice(&[1f32, f32::NAN, 1., 1.]));
    assert!(matches!(explanation.cause, Cause::Input { .. }), "{explanation}");
}

#[test]
fn a_write_that_leaves_no_version_is_seen() {
    let explanation = explain_planted(|x| {
        let buffer = Tensor::zeros([2, 4], F32);
        let y = x + &buffer;
        let large = named("large", || (x * 0.0 + 100.0).exp());
        buffer.data().copy_(&large.detach());
        y * &buffer
    });
    let culprit = explanation.culprit.unwrap();
    assert_eq!((culprit.operator.as_str(), culprit.path.as_deref()), ("aten::exp", Some("large")));
}

#[test]
fn filling_operators_use_up_no_repeats() {
    let mask = Tensor::ones([2, 4], F32).triu(1).to_kind(Kind::Bool);
    let explanation = explain_planted(|x| {
        let mut hidden = x.to_kind(Kind::Half);
        for _ in 0..40 {
            hidden = hidden.masked_fill(&mask, f64::NEG_INFINITY).softmax(-1, None);
        }
        let hidden = hidden * 0.0 + 300.0;
        named("product", || &hidden * &hidden).to_kind(Kind::Float)
    });
    assert_eq!(explanation.culprit.unwrap().largest_in_f32, Some(90000.0));
}

#[test]
fn a_backward_operator_of_a_custom_function_keeps_its_own_name() {
    let function = tch_amp::function(
        |ctx, x| {
            let y = x[0].exp();
            ctx.save_for_backward(&[&y]);
            Ok(y)
        },
        |ctx, gradients| {
            let [y] = ctx.saved_tensors()?;
            Ok(named("derivative", || &gradients[0] * y * 1e38 * 1e38))
        },
    );
    let explanation = explain_planted(|x| {
        drop(named("before", || batch() * 2.0));
        function.apply(&[x]).unwrap()
    });
    assert_eq!(explanation.culprit.unwrap().path.as_deref(), Some("derivative"));
}

#[test]
fn the_error_of_the_closure_comes_first() {
    let (model, x) = Model::with_batch();
    let scaler = GradScaler::disabled();
    let mut tracer = Tracer::new(&model.vs).unwrap();
    tracer.begin(&scaler).unwrap();
    let result = tracer.explain(&scaler, || {
        drop(x.to_kind(Kind::Float8e4m3fn));
        Err(Error::Torch("of the closure".to_owned()))
    });
    assert!(matches!(result, Err(Error::Torch(text)) if text == "of the closure"));
}

#[test]
fn a_buffer_that_overflows_in_the_iteration_is_not_called_an_old_one() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let weight = (vs.root() / "layer").ones("weight", &[4]);
    let mut variance = (vs.root() / "norm").zeros_no_train("running_var", &[1]);
    let scaler = GradScaler::disabled();
    let mut tracer = Tracer::new(&vs).unwrap();
    let mut loss = || {
        let x = &weight * 1e20;
        tch::no_grad(|| {
            variance *= 0.9;
            variance += x.square().mean(None) * 0.1;
        });
        (x * &variance).sum(None)
    };
    tracer.begin(&scaler).unwrap();
    scaler.backward(&loss()).unwrap();
    let explanation = tracer.explain(&scaler, || Ok(loss())).unwrap().unwrap();
    assert_eq!(explanation.cause, Cause::Values, "{explanation}");
    let buffer = vs.variables()["norm.running_var"].double_value(&[0]);
    assert_eq!(buffer, f64::INFINITY, "the buffer is as the iteration left it");
}

#[test]
fn negative_infinities_in_data_are_an_input() {
    let (model, x) = Model::with_batch();
    let data = x.masked_fill(&x.gt(1.2), f64::NEG_INFINITY);
    let loss = || model.loss(&data, Tensor::shallow_clone);
    let explanation = explain(&model.vs, Kind::Float, 1.0, loss);
    assert!(matches!(explanation.cause, Cause::Input { .. }), "{explanation}");
}
