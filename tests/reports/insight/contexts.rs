//! Custom functions, recomputed parts, nested regions, several devices and threads.

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Cause, Culprit, Explanation, Pass, named};
use tch_amp::recompute::checkpointed;
use tch_amp::{Autocast, function};

use crate::insight::{alone, explain, explain_planted};

fn culprit(explanation: &Explanation) -> &Culprit {
    assert_eq!(explanation.cause, Cause::Values, "{explanation}");
    explanation.culprit.as_ref().unwrap()
}

#[test]
fn a_custom_function_is_looked_into() {
    let exp = |scale: f64| {
        function(
            move |ctx, x| {
                let y = named("mine", || (x[0] * scale).exp());
                ctx.save_for_backward(&[&y]);
                Ok(y)
            },
            |ctx, grads| {
                let [y] = ctx.saved_tensors()?;
                Ok(named("derivative", || &grads[0] * y * 1e38 * 1e38))
            },
        )
    };
    let forward = explain_planted(|x| exp(1e6).apply(&[&(x.abs() + 1)]).unwrap());
    assert_eq!(culprit(&forward).operator, "aten::exp", "{forward}");
    assert_eq!(culprit(&forward).path.as_deref(), Some("mine"), "{forward}");
    let backward = explain_planted(|x| exp(1.0).apply(&[x]).unwrap());
    assert_eq!(culprit(&backward).operator, "aten::mul", "{backward}");
    assert_eq!(culprit(&backward).pass, Pass::Backward, "{backward}");
    assert_eq!(culprit(&backward).path.as_deref(), Some("derivative"), "{backward}");
}

/// A backward that gives no name of its own has that of the place where the function was called.
#[test]
fn the_backward_of_a_custom_function_belongs_to_where_it_was_called() {
    let root = || {
        function(
            |ctx, x| {
                let y = x[0].sqrt();
                ctx.save_for_backward(&[&y]);
                Ok(y)
            },
            |ctx, grads| {
                let [y] = ctx.saved_tensors()?;
                Ok(&grads[0] / (y * 2))
            },
        )
        .name("Root")
    };
    let explanation = explain_planted(|x| {
        // The same function elsewhere, which is finite.
        let x = named("before", || root().apply(&[&(x.abs() + 1)]).unwrap());
        let y = named("outer", || named("inner", || root().apply(&[&(&x * 0.0)]).unwrap()));
        named("after", || root().apply(&[&(y + 1)]).unwrap())
    });
    let culprit = culprit(&explanation);
    assert_eq!(culprit.operator, "aten::div", "{explanation}");
    assert_eq!(culprit.path.as_deref(), Some("outer.inner"), "{explanation}");
    assert_eq!(culprit.pass, Pass::Backward, "{explanation}");
    assert_eq!(culprit.forward_operator.as_deref(), Some("Root"), "{explanation}");
}

#[test]
fn a_recomputed_part_is_named() {
    let recomputed = |f: fn(&Tensor) -> Tensor| {
        explain_planted(move |x| {
            checkpointed(&[x], move |x| Ok(named("part", || f(x[0])))).unwrap()
        })
    };
    let forward = recomputed(|x| (x * 0.0 + 100.0).exp());
    assert_eq!(culprit(&forward).operator, "aten::exp", "{forward}");
    assert_eq!(culprit(&forward).path.as_deref(), Some("part"), "{forward}");
    assert_eq!(culprit(&forward).pass, Pass::Forward, "{forward}");
    let backward = recomputed(|x| (x * 0.0).sqrt());
    assert_eq!(culprit(&backward).forward_operator.as_deref(), Some("aten::sqrt"), "{backward}");
    assert_eq!(culprit(&backward).path.as_deref(), Some("part"), "{backward}");
    assert_eq!(culprit(&backward).pass, Pass::Backward, "{backward}");
}

#[test]
fn names_and_regions_nest() {
    let half = Autocast::new(Device::Cpu).dtype(Kind::Half);
    let explanation = explain_planted(|x| {
        named("encoder", || {
            half.run(|| named("attention", || (x * 0.0 + 300.0).mm(&(x * 0.0 + 300.0).tr())))
                .unwrap()
                .sum(None)
                + x
        })
    });
    let culprit = culprit(&explanation);
    assert_eq!(culprit.path.as_deref(), Some("encoder.attention"), "{explanation}");
    assert_eq!(culprit.operator, "aten::mm", "{explanation}");
    assert_eq!(culprit.dtype, "fp16", "{explanation}");
    assert_eq!(culprit.largest_in_f32, Some(360_000.0), "{explanation}");
    assert!(explanation.to_string().contains("keep encoder.attention in f32"), "{explanation}");
}

/// A weight that the program casts by itself.
#[test]
fn a_module_is_known_by_a_cast_of_its_parameter() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let weight = (vs.root() / "blocks" / 3).var("q", &[4, 4], nn::Init::Const(300.0));
    let x = Tensor::full([2, 4], 300.0, (Kind::Half, Device::Cpu));
    let loss = || x.mm(&weight.to_kind(Kind::Half).tr()).to_kind(Kind::Float).mean(None);
    let explanation = explain(&vs, Kind::Float, 1.0, loss);
    assert_eq!(culprit(&explanation).path.as_deref(), Some("blocks.3"), "{explanation}");
}

/// Each thread's recording has that thread's operators only.
#[test]
fn threads_are_explained_apart() {
    let _alone = alone();
    let explained = |exponent: bool| {
        let vs = VarStore::new(Device::Cpu);
        let weight = vs.root().ones("w", &[4]);
        let loss = || {
            named(if exponent { "exp" } else { "log" }, || {
                let x = &weight * if exponent { 100.0 } else { -1.0 };
                (0..20).fold(if exponent { x.exp() } else { x.log() }, |x, _| x * 1.0).sum(None)
            })
        };
        let explanation = explain(&vs, Kind::Float, 1.0, loss);
        let name = if exponent { "exp" } else { "log" };
        assert_eq!(culprit(&explanation).operator, format!("aten::{name}"), "{explanation}");
        assert_eq!(culprit(&explanation).path.as_deref(), Some(name), "{explanation}");
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || (0..5).for_each(|_| explained(thread % 2 == 0)));
        }
    });
}
