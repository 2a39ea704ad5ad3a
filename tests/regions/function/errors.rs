//! Errors in a forward or a backward, and where they are reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::function::{
    BackwardContext, ForwardContext, Function, FunctionError, FunctionResult, GradOutputs,
};
use tch_amp::optim::OptimizerError;

use crate::function::{apply, for_each_leaf, message, to_f64};
use testkit::tensors::leaf;
use testkit::{assert_says, for_each_device};

#[test]
fn an_error_of_the_forward_is_returned_with_its_cause() {
    for_each_device(|device| {
        #[derive(Debug, thiserror::Error)]
        #[error("the input is too hot: {0}")]
        struct TooHot(i32);

        let forward = |_: &mut ForwardContext, _: &[&Tensor]| -> FunctionResult<Tensor> {
            Err(TooHot(451).into())
        };
        let function =
            tch_amp::function(forward, |_, g: &GradOutputs<'_>| Ok(g[0].shallow_clone()));
        let error =
            function.name("Thermo").apply(&[leaf(&[1.0], Kind::Double, device)]).unwrap_err();
        assert_eq!(error.to_string(), "Thermo: forward failed: the input is too hot: 451");
        // The error has no source, so a report that prints sources does not repeat the message.
        assert!(std::error::Error::source(&error).is_none());
        let Error::Function(FunctionError::Forward { name, cause }) = error else {
            panic!("another error")
        };
        assert_eq!(name, "Thermo");
        assert_eq!(cause.downcast::<TooHot>().unwrap().0, 451);
    });
}

#[test]
fn libtorchs_and_other_errors_pass_through_the_question_mark() {
    for_each_leaf(&[1.0], |_, x| {
        let error = apply(&[&x], |_, x| Ok(x[0].f_reshape([7])?), |_, _| Ok(None)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "function: forward failed: shape '[7]' is invalid for input of size 1"
        );
        let anyhow = |_: &mut ForwardContext, _: &[&Tensor]| -> FunctionResult<Tensor> {
            Err(anyhow::anyhow!("the cause").context("the effect").into())
        };
        let error = apply(&[&x], anyhow, |_, _| Ok(None)).unwrap_err();
        assert_eq!(error.to_string(), "function: forward failed: the effect: the cause");
        let optimizer = Error::Optimizer(OptimizerError::Step(
            anyhow::anyhow!("the cause").context("the effect").into(),
        ));
        let report = format!("{:#}", anyhow::Error::from(optimizer));
        assert_eq!(report, "the optimizer's step failed: the effect: the cause");
    });
}

#[test]
fn an_error_of_the_backward_is_returned_by_backward() {
    for_each_leaf(&[1.0], |_, x| {
        let failing = || {
            let backward =
                |_: &BackwardContext<'_>, _: &GradOutputs<'_>| -> FunctionResult<Tensor> {
                    Err(anyhow::anyhow!("the cause").context("the effect").into())
                };
            tch_amp::function(|_, x| Ok(x[0] * 2.0), backward).name("Fails").apply(&[&x]).unwrap()
        };
        assert_says(
            (failing() * 3.0).f_backward(),
            "Fails: backward failed: the effect: the cause",
        );
        let panic = std::panic::catch_unwind(|| failing().backward()).unwrap_err();
        assert!(panic.downcast_ref::<String>().unwrap().contains("Fails: backward failed"));
        assert!(!x.grad().defined());
        // The rest of the graph and the thread can still be used.
        (&x * 2.0).backward();
        assert_eq!(to_f64(&x.grad()), [2.0]);
    });
}

/// Asserts that the error of `backward` has these texts if a function of two inputs returns these gradients.
fn is_refused<G: tch_amp::function::Gradients>(
    device: Device,
    texts: &[&str],
    gradients: impl Fn(&Tensor) -> G + Send + 'static,
) {
    let inputs = [(); 2].map(|()| leaf(&[1.0, 2.0], Kind::Double, device));
    let function = tch_amp::function(|_, x| Ok(x[0] * 2.0), move |_, g| Ok(gradients(&g[0])));
    let out = function.name("Wrong").apply(&inputs).unwrap();
    let error = message(out.sum(out.kind()).f_backward());
    texts.iter().for_each(|text| assert!(error.contains(text), "`{text}` is not in: {error}"));
}

#[test]
fn a_wrong_number_of_gradients_names_the_function_and_both_numbers() {
    for_each_device(|device| {
        for count in [0, 1, 3] {
            let want = format!("Wrong: backward returned {count} gradients for 2 inputs");
            is_refused(device, &[&want], move |g| {
                (0..count).map(|_| g.shallow_clone()).collect::<Vec<_>>()
            });
        }
    });
}

#[test]
fn a_type_with_a_wrong_number_of_gradients_is_refused_before_forward_runs() {
    let never = |_: &mut ForwardContext, _: &[&Tensor]| -> FunctionResult<Tensor> {
        panic!("forward must not run")
    };
    let three =
        |_: &BackwardContext<'_>, g: &GradOutputs<'_>| Ok([0, 1, 2].map(|_| g[0].shallow_clone()));
    let error = tch_amp::function(never, three)
        .apply(&[leaf(&[1.0], Kind::Double, Device::Cpu), leaf(&[1.0], Kind::Double, Device::Cpu)])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "function: its backward returns 3 gradients, but it was given 2 inputs; return one for each, or None"
    );
}

const INVALID: &str = "Function WrongBackward returned an invalid gradient at index 1";

#[test]
fn a_wrong_shape_names_the_function_and_the_index() {
    for_each_device(|device| {
        let texts = [INVALID, "got [3]", "[2]"];
        is_refused(device, &texts, |g| [g.shallow_clone(), g.repeat([2]).narrow(0, 0, 3)]);
    });
}

#[test]
fn a_wrong_dtype_names_the_function_and_the_index() {
    for_each_device(|device| {
        let texts = [INVALID, "got Long for an input of Double"];
        is_refused(device, &texts, |g| [g.shallow_clone(), g.to_kind(Kind::Int64)]);
        let texts = ["at index 0 - got ComplexDouble for an input of Double"];
        is_refused(device, &texts, |g| [g.to_kind(Kind::ComplexDouble), g.shallow_clone()]);
    });
}

#[test]
fn a_wrong_device_names_the_function_and_the_index() {
    for (index, device) in testkit::gpus().into_iter().enumerate() {
        let wanted = format!("expected device cuda:{index} but got cpu");
        is_refused(device, &[INVALID, &wanted], |g| [g.shallow_clone(), g.to_device(Device::Cpu)]);
    }
}

#[test]
fn a_gradient_for_an_input_that_has_none_is_ignored() {
    for_each_leaf(&[1.0], |_, x| {
        let (none, constant) = (Tensor::new(), x.detach());
        let out = apply(
            &[&x, &none, &constant],
            |_, x| Ok(x[0] * 2.0),
            |_, g| Ok([&g[0] * 2.0, g[0].ones_like(), g[0].to_kind(Kind::Int64)]),
        );
        out.unwrap().backward();
        assert_eq!(to_f64(&x.grad()), [2.0]);
        assert!(!constant.grad().defined());
    });
}

#[test]
fn casting_to_an_integer_is_refused() {
    for_each_leaf(&[1.0], |device, x| {
        let double = tch_amp::function(|_, x| Ok(x[0] * 2.0), |_, g| Ok(&g[0] * 2.0));
        let double = double.cast_inputs(Kind::Int64);
        drop(double.apply(&[&x]).unwrap());
        let error = tch_amp::autocast(device, || double.apply(&[&x])).unwrap().unwrap_err();
        assert_eq!(
            error.to_string(),
            "function: cast_inputs asks for Int64, which is not a floating dtype"
        );
    });
}

#[test]
fn the_default_name_is_that_of_the_type() {
    struct Generic<T>(std::marker::PhantomData<T>);

    impl<T: Send + 'static> Function for Generic<T> {
        type Outputs = Tensor;
        type Gradients = Tensor;

        fn forward(&self, _: &mut ForwardContext, _: &[&Tensor]) -> FunctionResult<Tensor> {
            Err("no".into())
        }

        fn backward(&self, _: &BackwardContext<'_>, g: &GradOutputs<'_>) -> FunctionResult<Tensor> {
            Ok(g[0].shallow_clone())
        }
    }

    let generic = Generic(std::marker::PhantomData::<Arc<str>>);
    let error = generic.apply(&[leaf(&[1.0], Kind::Double, Device::Cpu)]).unwrap_err();
    assert_eq!(error.to_string(), "Generic: forward failed: no");
}

#[test]
fn the_name_is_queried_only_by_apply() {
    struct Shy {
        asked: Arc<AtomicUsize>,
    }

    impl Function for Shy {
        type Outputs = Tensor;
        type Gradients = Vec<Tensor>;

        fn forward(&self, _: &mut ForwardContext, x: &[&Tensor]) -> FunctionResult<Tensor> {
            Ok(x[0] * 2.0)
        }

        fn backward(
            &self,
            _: &BackwardContext<'_>,
            _: &GradOutputs<'_>,
        ) -> FunctionResult<Vec<Tensor>> {
            Ok(vec![])
        }

        fn name(&self) -> &str {
            self.asked.fetch_add(1, Ordering::SeqCst);
            "Shy\0one"
        }
    }

    let asked = Arc::new(AtomicUsize::new(0));
    let y = Shy { asked: Arc::clone(&asked) }
        .apply(&[leaf(&[1.0], Kind::Double, Device::Cpu)])
        .unwrap();
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert_says(y.f_backward(), "Shy one: backward returned 0 gradients for 1 inputs");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}
