//! Activation checkpointing: gradients, random numbers, autocast, nesting, errors and memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::autocast::{AutocastGuard, Plan, Rule, RunAs, is_autocast_enabled};
use tch_amp::checkpoint::Rng;
use tch_amp::function::{FunctionError, FunctionResult, GradConfig, Outputs, grad};
use tch_amp::memory::SavedTensors;
use tch_amp::recompute::{Recomputed, RecomputedT, checkpointed};
use tch_amp::{Autocast, Error, GradScaler};

use testkit::assert_says;
use testkit::bits::{bits, from_hex, hex};
use testkit::python::Oracle;

/// A block with dropout, a norm and two products.
fn block(vs: &nn::Path<'_>) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(vs / "up", 8, 16, Default::default()))
        .add_fn(|xs| xs.gelu("none").dropout(0.3, true))
        .add(nn::layer_norm(vs / "norm", vec![16], Default::default()))
        .add(nn::linear(vs / "down", 16, 8, Default::default()))
}

/// Four blocks, the same for the same seed, of which every second one is recomputed or none.
fn model(vs: &VarStore, recomputed: bool) -> nn::Sequential {
    tch::manual_seed(5);
    let mut model = nn::seq();
    for i in 0..4 {
        let block = block(&(vs.root() / i));
        if recomputed && i % 2 == 0 {
            model = model.add(Recomputed::new(block));
        } else {
            model = model.add(block);
        }
    }
    model
}

/// The bits of the gradients and of the loss after some iterations.
fn train(device: Device, dtype: Option<Kind>, recomputed: bool) -> Vec<Vec<u8>> {
    let vs = VarStore::new(device);
    let model = model(&vs, recomputed);
    let scaler = GradScaler::new(device).unwrap();
    tch::manual_seed(6);
    let xs = Tensor::randn([5, 8], (Kind::Float, device)).set_requires_grad(true);
    let mut all = Vec::new();
    for _ in 0..3 {
        let region = Autocast::new(device).enabled(dtype.is_some());
        let region = dtype.map_or(region, |dtype| region.dtype(dtype));
        let loss = region.run(|| model.forward(&xs).square().mean(Kind::Float)).unwrap();
        scaler.backward(&loss).unwrap();
        all.push(bits(&loss));
    }
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    all.extend(variables.iter().map(|(_, w)| bits(&w.grad())));
    all.push(bits(&xs.grad()));
    // The generator has continued as if nothing had run twice.
    all.push(bits(&Tensor::rand([4], (Kind::Float, device))));
    all
}

#[test]
fn gradients_and_random_numbers_are_the_same_bit_by_bit() {
    testkit::for_each_device(|device| {
        for dtype in [None, Some(Kind::BFloat16), Some(Kind::Half)] {
            if dtype == Some(Kind::Half) && device == Device::Cpu {
                continue;
            }
            let same = train(device, dtype, true) == train(device, dtype, false);
            assert!(same, "{device:?} {dtype:?}");
        }
    });
}

/// The outputs of `f`, as a part that is recomputed or by a plain call.
fn part<O: Outputs>(
    recomputed: bool,
    inputs: &[&Tensor],
    f: impl Fn(&[&Tensor]) -> FunctionResult<O> + Send + 'static,
) -> FunctionResult<O> {
    if recomputed { Ok(checkpointed(inputs, f)?) } else { f(inputs) }
}

/// `x · w`, checkpointed, with a count of the runs.
fn product(x: &Tensor, w: &Tensor, runs: &Arc<AtomicUsize>) -> Tensor {
    let (w, runs) = (w.shallow_clone(), Arc::clone(runs));
    let f = move |x: &[&Tensor]| {
        runs.fetch_add(1, Ordering::Relaxed);
        Ok(x[0].f_matmul(&w)?)
    };
    checkpointed(&[x], f).unwrap()
}

fn eye() -> Tensor {
    Tensor::eye(3, (Kind::Float, Device::Cpu))
}

#[test]
fn the_closure_runs_once_more_in_each_backward_and_not_without_gradients() {
    let (w, runs) = (eye().set_requires_grad(true), Arc::default());
    let y = product(&eye(), &w, &runs);
    assert!(y.requires_grad());
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    let loss = y.sum(Kind::Float);
    GradScaler::disabled().backward_retain_graph(&loss).unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 2);
    loss.backward();
    assert_eq!(runs.load(Ordering::Relaxed), 3);
    assert_eq!(w.grad(), eye().ones_like() * 2.0);
    let y = no_grad(|| product(&eye(), &w, &runs));
    assert!(!y.requires_grad());
    assert_eq!(runs.load(Ordering::Relaxed), 4);
}

#[test]
fn weights_are_trained_where_no_input_requires_a_gradient_and_backward_runs_in_the_region() {
    // The weight is used again in the region, after a cast in the first run, which has no history.
    let w = eye().set_requires_grad(true);
    let region = AutocastGuard::new(Device::Cpu).unwrap();
    let y = product(&eye(), &w, &Arc::default());
    let again = eye().matmul(&w);
    assert!(again.requires_grad());
    let loss = y.sum(Kind::Float) + again.sum(Kind::Float) * 2.0;
    loss.backward();
    // And again, after a cast in the second run, whose graph is gone.
    eye().matmul(&w).sum(Kind::Float).backward();
    drop(region);
    assert_eq!(w.grad(), eye().ones_like() * 4.0);
}

#[test]
fn the_second_run_has_the_autocast_state_of_the_first() {
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    let w = eye().set_requires_grad(true);
    let f = move |x: &[&Tensor]| {
        count.fetch_add(usize::from(is_autocast_enabled(Device::Cpu)), Ordering::Relaxed);
        let y = x[0].matmul(&w);
        assert_eq!(y.kind(), Kind::BFloat16);
        Ok(y)
    };
    let y: Tensor = Autocast::new(Device::Cpu).run(|| checkpointed(&[eye()], f)).unwrap().unwrap();
    y.sum(Kind::Float).backward();
    assert_eq!(seen.load(Ordering::Relaxed), 2);
}

/// Regions that keep a product in f32 within another region, and whether the backward pass is inside of that, too.
fn regions_of_products() -> Vec<(&'static str, Autocast, Option<Autocast>)> {
    let (half, f32) =
        (Autocast::new(Device::Cpu).dtype(Kind::BFloat16), Plan::new(Device::Cpu).unwrap());
    let narrow = Rule { below: Some(1 << 20), ..Rule::new("matmul", RunAs::F32) };
    let narrow = Plan { dtype: Some(Kind::BFloat16), rules: vec![narrow], ..f32.clone() };
    vec![
        ("switched off inside", half, Some(Autocast::new(Device::Cpu).enabled(false))),
        ("a plan in f32 inside", half, Some(Autocast::new(Device::Cpu).plan(&f32).unwrap())),
        ("kept in f32", half.keep_in_f32(["matmul"]), None),
        ("kept in f32 inside", half, Some(half.keep_in_f32(["matmul"]))),
        ("a plan", half.plan(&narrow).unwrap(), None),
        ("fp16", half.dtype(Kind::Half).keep_in_f32(["matmul"]), None),
        ("half", half, None),
    ]
}

/// The factors of a product.
fn factors() -> (Tensor, Tensor) {
    tch::manual_seed(7);
    let draw = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu)) * 300;
    (draw([5, 8]), draw([8, 3]))
}

/// The bits of the gradients of a product with values for which fp16 is too small.
fn gradients_of_a_product(
    regions: (Autocast, Option<Autocast>),
    recomputed: bool,
    is_inside: bool,
) -> Vec<Vec<u8>> {
    let (outer, inner) = regions;
    let (x, w) = factors();
    let (x, w) = (x.set_requires_grad(true), w.set_requires_grad(true));
    let weight = w.shallow_clone();
    let product = move |x: &[&Tensor]| {
        let product = || x[0].f_matmul(&weight);
        Ok(inner.map_or_else(|| Ok(product()), |region| region.run(product))??)
    };
    let forward = || part(recomputed, &[&x], product).unwrap();
    let loss = |y: &Tensor| y.to_kind(Kind::Float).square().sum(Kind::Float);
    match is_inside {
        true => outer.run(|| loss(&forward()).backward()).unwrap(),
        false => loss(&outer.run(forward).unwrap()).backward(),
    }
    [x, w].iter().map(|x| bits(&x.grad())).collect()
}

/// The second run has the state of the first, and its backward pass that of the backward pass around it.
#[test]
fn what_a_region_keeps_in_f32_has_gradients_in_f32() {
    let off = (Autocast::new(Device::Cpu).enabled(false), None);
    let exact = gradients_of_a_product(off, false, false);
    for (name, outer, inner) in regions_of_products() {
        let regions = (outer, inner);
        for is_inside in [false, true] {
            let plain = gradients_of_a_product(regions, false, is_inside);
            assert!(
                gradients_of_a_product(regions, true, is_inside) == plain,
                "{name}, {is_inside}"
            );
            // As in PyTorch, autocast casts products of a backward pass inside of a region, but for what a rule keeps.
            let is_exact = name != "half"
                && !(is_inside && name.ends_with("inside") && name != "kept in f32 inside");
            assert_eq!(plain == exact, is_exact, "{name}, {is_inside}");
        }
    }
}

/// What a region runs in half precision or composes is the same in the second run.
#[test]
fn the_second_run_has_the_rules_of_the_first() {
    const SDPA: &str = "scaled_dot_product_attention";
    let half = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
    let rules = vec![Rule::new(SDPA, RunAs::Composed { most_bytes: u64::MAX })];
    let plan = Plan { dtype: Some(Kind::BFloat16), rules, ..Plan::new(Device::Cpu).unwrap() };
    let lists = half.prefer_half(["exp"]).keep_in_f32(["sin"]);
    for region in [lists, half.plan(&plan).unwrap()] {
        let run = |region: Autocast, recomputed: bool| {
            tch::manual_seed(7);
            let x = Tensor::randn([2, 5, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            let f = |x: &[&Tensor]| {
                let (k, none) = (x[0].tanh(), None::<&Tensor>);
                let y = Tensor::scaled_dot_product_attention(
                    x[0], &k, x[0], none, 0.0, false, None, false,
                );
                Ok((y.exp() + x[0].exp()).sin())
            };
            let y: Tensor = region.run(|| part(recomputed, &[&x], f).unwrap()).unwrap();
            y.sum(Kind::Float).backward();
            bits(&x.grad())
        };
        assert_eq!(run(region, true), run(region, false));
        assert_ne!(run(region, true), run(region.enabled(false), true));
    }
}

/// Both kinds of PyTorch's checkpointing, and a backward pass in the region for the kind that is the counterpart, which
/// is not the reentrant one.
#[test]
fn gradients_are_those_of_pytorchs_checkpointing() {
    let Some(oracle) = Oracle::find("recompute.py") else { return };
    let (x, w) = factors();
    let answers = oracle.run(&[], &format!("{}\n{}\n", hex(&x), hex(&w)));
    let half = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
    let off = Some(Autocast::new(Device::Cpu).enabled(false));
    let ours = |off_inside: bool, is_inside| {
        let regions = (half, off.filter(|_| off_inside));
        gradients_of_a_product(regions, true, is_inside)
    };
    let cases = [true, false].into_iter().flat_map(|reentrant| {
        [true, false].into_iter().flat_map(move |off_inside| {
            [false, true].map(|is_inside| (reentrant, off_inside, is_inside))
        })
    });
    let mut compared = 0;
    for ((reentrant, off_inside, is_inside), line) in cases.zip(answers.lines()) {
        if !reentrant || !is_inside {
            let theirs: Vec<_> = line.split(' ').map(from_hex).collect();
            let same = ours(off_inside, is_inside) == theirs;
            assert!(
                same,
                "reentrant: {reentrant}, off inside: {off_inside}, backward inside: {is_inside}"
            );
            compared += 1;
        }
    }
    assert_eq!(compared, 6);
}

/// Two outputs of two inputs and a weight.
fn inner(w: &Tensor) -> impl Fn(&[&Tensor]) -> FunctionResult<[Tensor; 2]> + Send + use<> {
    let w = w.shallow_clone();
    move |x| Ok([x[0].matmul(&w).tanh(), x[1].sin()])
}

#[test]
fn nested_calls_and_several_inputs_and_outputs() {
    let run = |recomputed: bool| {
        let a = (eye() * 2.0).set_requires_grad(true);
        let b = (eye() + 1.0).set_requires_grad(true);
        let w = (eye() - 0.5).set_requires_grad(true);
        let weight = w.shallow_clone();
        let outer = move |x: &[&Tensor]| {
            let [p, q] = part(recomputed, &[&x[0].exp(), &(x[1] * 3.0)], inner(&weight))?;
            // An integer output, one that is not used, and an input.
            Ok(vec![&p * &q, p.argmax(0, false), q, x[0].shallow_clone(), Tensor::new()])
        };
        let outputs = part(recomputed, &[&a, &b], outer).unwrap();
        assert_eq!((outputs[1].kind(), outputs[4].defined()), (Kind::Int64, false));
        let loss = outputs[0].sum(Kind::Float) * 2.0 + outputs[3].get(0).sum(Kind::Float);
        loss.backward();
        [a, b, w].map(|w| bits(&w.grad()))
    };
    assert_eq!(run(true), run(false));
}

/// libtorch leaves the gradients of both terms of a sum in one memory, to which a part must not add what belongs to
/// one.
#[test]
fn gradients_that_the_rest_of_the_pass_left_in_one_memory_are_told_apart() {
    let leaves = || [(); 2].map(|()| eye().set_requires_grad(true));
    let rest = |leaves: &[Tensor; 2]| {
        let [a, b] = leaves.each_ref().map(|w| w.reshape([1, -1]));
        ((a + b) * (eye() + 1.0).reshape([1, -1])).sum(Kind::Float)
    };
    let both = leaves();
    rest(&both).backward();
    let [a, b] = both.map(|w| w.grad().data_ptr());
    assert_eq!(a, b, "libtorch shares otherwise by now");

    let run = |recomputed: bool| {
        let leaves = leaves();
        let (x, weight) = (eye() * 3.0, leaves[0].shallow_clone());
        let y = part(recomputed, &[&x], move |x| Ok(x[0].matmul(&weight))).unwrap();
        // What was computed last is differentiated first.
        let rest = rest(&leaves);
        (y.sum(Kind::Float) + rest).backward();
        leaves.map(|w| bits(&w.grad()))
    };
    assert_eq!(run(true), run(false));
}

/// The message of a backward through a closure that returns what `f` says, for the number of the run.
fn failure<O: tch_amp::function::Outputs>(
    f: impl Fn(usize, &Tensor) -> FunctionResult<O> + Send + 'static,
    first: impl Fn(&O) -> Tensor,
) -> String {
    let w = eye().set_requires_grad(true);
    let (weight, runs) = (w.shallow_clone(), AtomicUsize::new(0));
    let run = move |_: &[&Tensor]| f(runs.fetch_add(1, Ordering::Relaxed), &weight);
    let outputs = checkpointed(&[eye()], run).unwrap();
    let before = Rng(Device::Cpu).get_state().unwrap();
    let error = first(&outputs).sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert_eq!(Rng(Device::Cpu).get_state().unwrap(), before);
    assert!(!w.grad().defined());
    error
}

#[test]
fn a_second_run_that_differs_is_an_error() {
    let same = |y: &Tensor| y.shallow_clone();
    let shape = failure(|run, w| Ok(w.narrow(0, 0, 3 - run as i64).square()), same);
    assert!(
        shape.contains("saved tensor 0 of the second run is Float [2, 3] on cpu")
            && shape.contains("that of the first was Float [3, 3] on cpu"),
        "{shape}"
    );
    let kinds = [Kind::Float, Kind::Double];
    let kind = failure(move |run, w| Ok(w.to_kind(kinds[run]).square()), same);
    assert!(kind.contains("Double") && kind.contains("the same both times"), "{kind}");
    let counts = |first: usize, second: usize| {
        let sum = move |run: usize, w: &Tensor| {
            let squares = (0..[first, second][run]).map(|_| w.square());
            Ok(squares.fold(w * 1.0, |sum, square| sum + square))
        };
        failure(sum, same)
    };
    for (first, second) in [(1, 2), (3, 1), (1, 0)] {
        let number = counts(first, second);
        let said = format!(
            "second run saved {second} tensors for the backward pass, and the first {first}"
        );
        assert!(number.contains(&said), "{number}");
    }
}

#[test]
fn a_closure_that_fails_or_panics_is_an_error() {
    let same = |y: &Tensor| y.shallow_clone();
    let fails =
        failure(|run, w| if run == 0 { Ok(w.square()) } else { Err("no memory".into()) }, same);
    assert!(fails.contains("checkpointed") && fails.contains("no memory"), "{fails}");
    let panics = failure(
        |run, w| {
            let _numbers = Tensor::rand([2], (Kind::Float, Device::Cpu));
            assert!(run == 0, "it has gone wrong");
            Ok(w.square())
        },
        same,
    );
    assert!(panics.contains("it has gone wrong"), "{panics}");
    let f = |_: &[&Tensor]| -> FunctionResult<Tensor> { Err("not this time".into()) };
    let error = checkpointed(&[eye()], f).unwrap_err();
    assert!(matches!(error, Error::Function(FunctionError::Forward { .. })), "{error:?}");
}

#[test]
fn gradients_of_chosen_tensors_run_the_part_if_they_need_it() {
    let [w, x] = [eye(), eye() + 1.0].map(|w| w.set_requires_grad(true));
    let runs = Arc::default();
    let y = product(&x, &w, &runs).sum(Kind::Float);
    let kept = GradConfig { retain_graph: Some(true), ..Default::default() };
    let plain = x.matmul(&w).sum(Kind::Float);
    for (run, wanted) in [(2, &x), (3, &w)] {
        assert_eq!(
            grad(&[&y], &[wanted], &kept).unwrap(),
            grad(&[&plain], &[wanted], &kept).unwrap()
        );
        assert_eq!(runs.load(Ordering::Relaxed), run);
    }
    assert!(!w.grad().defined() && !x.grad().defined());
    // A sum needs nothing that was saved.
    let counted = Arc::clone(&runs);
    let sum = move |x: &[&Tensor]| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(x[0].sum(Kind::Float))
    };
    let y: Tensor = checkpointed(&[&x], sum).unwrap();
    y.backward();
    assert_eq!(runs.load(Ordering::Relaxed), 4);
}

#[test]
fn a_changed_input_is_an_error() {
    let (mut x, w) = (eye(), eye().set_requires_grad(true));
    let y = product(&x, &w, &Arc::default());
    drop(x.fill_(2.0));
    assert_says(y.sum(Kind::Float).f_backward(), "modified by an inplace operation");
    assert!(!w.grad().defined());
}

/// The first and the second derivatives of a network whose parts share a weight, one of them within another.
#[test]
fn gradients_can_be_differentiated_again() {
    let run = |recomputed: bool| {
        let (w, x) = ((eye() + 0.1).set_requires_grad(true), (eye() * 0.7).set_requires_grad(true));
        let layer = |weight: &Tensor| {
            let weight = weight.shallow_clone();
            move |x: &[&Tensor]| Ok(x[0].matmul(&weight).tanh())
        };
        let weight = w.shallow_clone();
        let outer = move |x: &[&Tensor]| {
            let y = part(recomputed, &[&x[0].exp()], layer(&weight))?;
            Ok(y.square())
        };
        let hidden = part(recomputed, &[&x], outer).unwrap();
        let y = part(recomputed, &[&hidden], layer(&w)).unwrap();
        let config = GradConfig { create_graph: true, ..Default::default() };
        let first = grad(&[&y.sum(Kind::Float)], &[&x, &w], &config).unwrap();
        let [of_x, of_w] = [0, 1].map(|i| first[i].as_ref().unwrap().shallow_clone());
        (of_x.square().sum(Kind::Float) + of_w.sin().sum(Kind::Float)).backward();
        [of_x, of_w, x.grad(), w.grad()].map(|g| bits(&g))
    };
    assert_eq!(run(true), run(false));
}

/// A gradient inside of a part, such as a penalty, is computed in both runs.
#[test]
fn a_part_may_compute_gradients() {
    let run = |recomputed: bool| {
        let w = (eye() + 0.5).set_requires_grad(true);
        let weight = w.shallow_clone();
        let penalty = move |x: &[&Tensor]| {
            let x = x[0].detach().set_requires_grad(true);
            let config = GradConfig { create_graph: true, ..Default::default() };
            let y = x.matmul(&weight).tanh();
            let slope = grad(&[&y.sum(Kind::Float)], &[&x], &config)?.remove(0);
            Ok(slope.ok_or("no gradient")?.square() + y.sin())
        };
        part(recomputed, &[&eye()], penalty).unwrap().sum(Kind::Float).backward();
        bits(&w.grad())
    };
    assert_eq!(run(true), run(false));
}

/// State that a part changes in place before it saves it, as a spectral norm does, changes in both runs.
#[test]
fn a_part_may_change_what_it_saves() {
    let (w, scale) = (eye().set_requires_grad(true), eye() * 8.0);
    let (weight, changed) = (w.shallow_clone(), scale.shallow_clone());
    let f = move |x: &[&Tensor]| {
        drop(no_grad(|| changed.shallow_clone().g_mul_scalar_(0.5)));
        Ok((x[0].matmul(&weight) * &changed).tanh())
    };
    let y: Tensor = checkpointed(&[eye()], f).unwrap();
    assert_eq!(scale, eye() * 4.0);
    y.sum(Kind::Float).backward();
    assert_eq!(scale, eye() * 2.0);
    // What the program changes between the runs is refused.
    let mut x = eye().set_requires_grad(true);
    let y: Tensor = checkpointed(&[&x], |x| Ok(x[0].square())).unwrap();
    drop(no_grad(|| x.fill_(2.0)));
    assert_says(y.sum(Kind::Float).f_backward(), "modified by an inplace operation");
}

#[test]
fn nested_tensors_are_recomputed() {
    let run = |recomputed: bool| {
        let x = (eye() + 1.0).set_requires_grad(true);
        let f = |x: &[&Tensor]| {
            let lengths = Tensor::from_slice2(&[[2i64, 3], [3, 3]]);
            let nested = x[0].reshape([1, 3, 3]).expand([2, 3, 3], false).contiguous();
            let nested = Tensor::internal_nested_from_padded(&nested, &lengths, false);
            Ok((&nested * &nested).to_padded_tensor(0.0, [2i64, 3, 3].as_slice()))
        };
        part(recomputed, &[&x], f).unwrap().sum(Kind::Float).backward();
        bits(&x.grad())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn outputs_without_a_gradient_need_none() {
    let w = eye().set_requires_grad(true);
    let weight = w.shallow_clone();
    let f = move |x: &[&Tensor]| Ok([x[0] * 2.0, x[0].matmul(&weight)]);
    let [constant, y] = checkpointed(&[eye()], f).unwrap();
    assert!(!constant.requires_grad() && y.requires_grad());
}

/// What a region inside of a part saves is kept in its form and is not computed again.
#[test]
fn saved_tensors_inside_and_around() {
    let run = |recomputed: bool, around: Option<SavedTensors>, inside: Option<SavedTensors>| {
        tch::manual_seed(11);
        let draw = || Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
        let (x, w) = (draw().set_requires_grad(true), draw().set_requires_grad(true));
        let weight = w.shallow_clone();
        let f = move |x: &[&Tensor]| {
            let h = x[0].matmul(&weight);
            let last = || h.tanh().sin();
            Ok(inside.map_or_else(|| Ok(last()), |saved| saved.run(last))?)
        };
        let forward = || part(recomputed, &[&(&x * 1.0)], f).unwrap();
        let y = match around {
            Some(saved) => saved.run(forward).unwrap(),
            None => forward(),
        };
        y.sum(Kind::Float).backward();
        [x, w].map(|t| bits(&t.grad()))
    };
    let (half, fp8) = (Some(SavedTensors::half()), Some(SavedTensors::fp8_rows()));
    let exact = run(false, None, None);
    assert_eq!(run(true, half, None), exact, "all of it is recomputed");
    assert_eq!(run(true, fp8, half), run(false, None, half));
    assert_ne!(run(true, None, half), exact);
}

#[test]
fn modules_that_are_told_whether_they_train() {
    let vs = VarStore::new(Device::Cpu);
    let config = nn::BatchNormConfig { ws_init: nn::Init::Const(0.5), ..Default::default() };
    let plain = nn::batch_norm1d(vs.root() / "a", 3, config);
    let norm = nn::batch_norm1d(vs.root() / "b", 3, config);
    let xs = Tensor::randn([6, 3], (Kind::Float, Device::Cpu));
    let module = RecomputedT::new(norm);
    let [y, expected] = [module.forward_t(&xs, true), plain.forward_t(&xs, true)];
    assert_eq!(y, expected);
    y.square().sum(Kind::Float).backward();
    expected.square().sum(Kind::Float).backward();
    let variables = vs.variables();
    assert_eq!(variables["a.weight"].grad(), variables["b.weight"].grad());
    // As in PyTorch, the second run counts the batch again.
    let mean = |name: &str| variables[&format!("{name}.running_mean")].double_value(&[0]);
    assert!((mean("b") - 1.9 * mean("a")).abs() < 1e-6);
}

#[test]
fn backward_may_run_on_another_thread() {
    let (w, runs) = (eye().set_requires_grad(true), Arc::default());
    let loss = product(&eye(), &w, &runs).sum(Kind::Float);
    std::thread::spawn(move || loss.backward()).join().unwrap();
    assert_eq!(w.grad(), eye().ones_like());
}

#[test]
fn a_captured_tensor_may_have_a_history() {
    let run = |recomputed: bool| {
        let w = eye().set_requires_grad(true);
        let hidden = w.exp();
        let captured = hidden.shallow_clone();
        let f = move |x: &[&Tensor]| Ok((x[0] + captured.tanh()).square());
        (part(recomputed, &[&eye()], f).unwrap() + hidden).sum(Kind::Float).backward();
        bits(&w.grad())
    };
    assert_eq!(run(true), run(false));
}
