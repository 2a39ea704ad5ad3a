//! What a budget leaves behind: nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Kind, Tensor};
use tch_amp::autocast::autocast_dtype;
use tch_amp::{Error, Result};

use crate::budget::alone;
use crate::budget::models::Model;
use crate::budget::program::Program;
use testkit::tensors::variables;

/// What a budget has to leave as it was.
#[derive(Debug, PartialEq)]
struct State {
    /// The variables by name.
    variables: Vec<(String, Vec<f32>)>,
    /// Where they are in memory.
    places: Vec<usize>,
    gradients: Vec<Option<Vec<f32>>>,
    /// The next random number.
    random: f64,
}

impl State {
    /// Takes a random number.
    fn of(model: &Model) -> Self {
        let variables = variables(&model.vs);
        let numbers = |t: &Tensor| Vec::try_from(t.flatten(0, -1).to_kind(Kind::Float)).unwrap();
        let gradient = |t: &Tensor| t.grad().defined().then(|| numbers(&t.grad()));
        Self {
            places: variables.values().map(|t| t.data_ptr() as usize).collect(),
            gradients: variables.values().map(gradient).collect(),
            variables: variables.into_iter().map(|(name, t)| (name, numbers(&t))).collect(),
            random: Tensor::rand([], tch::kind::DOUBLE_CPU).double_value(&[]),
        }
    }
}

/// A program with gradients and moved statistics, and a generator with this seed.
fn program(kind: &'static str, change: &'static str) -> Program {
    let program = Program::new(kind, Kind::BFloat16, change, 2);
    for (i, parameter) in program.model.parameters().into_iter().enumerate() {
        if i % 2 == 0 {
            parameter.square().sum(None::<Kind>).backward();
        }
    }
    tch::manual_seed(11);
    program
}

#[test]
fn everything_is_put_back() {
    let _alone = alone();
    for (kind, change) in [
        ("conv", "none"),
        ("encoder", "none"),
        ("mlp", "layer_is_detached"),
        ("gpt", "stale_copy_of_one_layer"),
    ] {
        let program = program(kind, change);
        let before = State::of(&program.model);
        tch::manual_seed(11);
        let _report = program.measure().unwrap();
        assert_eq!(State::of(&program.model), before, "{kind}");
    }
}

#[test]
fn everything_is_put_back_after_an_error_and_a_panic() {
    let _alone = alone();
    for panics in [false, true] {
        for at in 1..=7 {
            let program = program("conv", "none");
            let before = State::of(&program.model);
            tch::manual_seed(11);
            let mut calls = 0;
            let measure = || -> Result<_> {
                program.budget().measure(
                    || program.optimizer(),
                    |run, optimizer| {
                        calls += 1;
                        let loss = program.iterate(run, optimizer)?;
                        assert!(!(panics && calls == at), "planted");
                        if calls == at {
                            return Err(Error::InvalidArgument {
                                name: "it",
                                problem: "is planted".to_owned(),
                            });
                        }
                        Ok(loss)
                    },
                )
            };
            let ended = catch_unwind(AssertUnwindSafe(measure));
            assert_eq!((ended.is_err(), calls), (panics, at));
            assert_eq!(State::of(&program.model), before, "{at}");
            // Neither a region nor the emulation is left.
            assert_eq!(autocast_dtype(program.model.vs.device()).unwrap(), Kind::BFloat16);
            let x = Tensor::from_slice(&[1.0f32 + f32::EPSILON]);
            assert_eq!(
                x.matmul(&x).double_value(&[]),
                f64::from((1.0 + f32::EPSILON) * (1.0 + f32::EPSILON))
            );
        }
    }
}

#[test]
fn a_budget_within_a_budget_is_refused() {
    let _alone = alone();
    let program = program("mlp", "none");
    let measured = program.budget().measure(
        || program.optimizer(),
        |run, optimizer| {
            let _inner = program.measure()?;
            program.iterate(run, optimizer)
        },
    );
    assert!(
        matches!(&measured, Err(Error::Torch(problem)) if problem.contains("emulates half precision already")),
        "{measured:?}"
    );
    program.measure().unwrap().assert();
}
