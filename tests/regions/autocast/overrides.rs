//! Operators for which a region overrides autocast's lists, beside the same with casts by hand.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{AutocastError, AutocastState, LOG_PROBABILITIES, Plan, Rule, RunAs};

use tch_amp::function::{GradConfig, grad};
use tch_amp::{Amp, Autocast, Error};

use crate::autocast::{BF16, F32, OUTSIDE, gradient, refusal, seen};
use testkit::python::Oracle;
use testkit::simulation::lacks_libraries;
use testkit::{for_each_device, to_f64};

fn region() -> Autocast {
    Autocast::new(Device::Cpu)
}

fn random(seed: i64) -> Tensor {
    random_on(Device::Cpu, seed)
}

fn random_on(device: Device, seed: i64) -> Tensor {
    crate::autocast::random(device, seed, &[4, 4])
}

type Operator = fn(&Tensor, &Tensor) -> Tensor;
type Function = fn(&Tensor) -> Tensor;

/// Operators of all lists and of none, with arguments of all kinds: their names, and calls of them.
const OPERATORS: &[(&str, Operator)] = &[
    ("matmul", |a, b| a.matmul(b)),
    ("linear", |a, b| a.linear(b, None::<&Tensor>)),
    ("softmax", |a, _| a.softmax(-1, None::<Kind>)),
    ("exp", |a, _| a.exp()),
    ("mul", |a, b| a * b),
    ("add", |a, b| a.g_add(b)),
    ("cat", |a, b| Tensor::cat(&[a, b], 0)),
    ("index", |a, _| a.index(&[Some(Tensor::from_slice(&[2i64, 0])), None])),
    ("layer_norm", |a, b| {
        a.layer_norm([4], Some(b.select(0, 0)), Some(b.select(0, 1)), 1e-5, false)
    }),
    ("mse_loss", |a, b| a.mse_loss(b, tch::Reduction::Mean)),
    ("sum", |a, _| a.sum_dim_intlist(0, false, None::<Kind>)),
];

/// The result and the gradients of `f`.
fn computed(device: Device, f: impl Fn(&Tensor, &Tensor) -> Tensor) -> [Tensor; 3] {
    let (a, b) = (random_on(device, 1), random_on(device, 2));
    let result = f(&a, &b);
    result.to_kind(F32).square().sum(F32).backward();
    [result.detach(), gradient(&a), gradient(&b)]
}

/// Numbers in half precision, whatever the lists say.
fn halved(x: &Tensor) -> Tensor {
    x.to_kind(BF16)
}

#[test]
fn operators_stay_in_f32_forward_and_backward() {
    for_each_device(|device| {
        for (name, operator) in OPERATORS {
            let region = Autocast::new(device).dtype(BF16).keep_in_f32([name]);
            let inside = |a: &Tensor, b: &Tensor| operator(&halved(a), &halved(b));
            let found = computed(device, |a, b| region.run(|| inside(a, b)).unwrap());
            let by_hand =
                |a: &Tensor, b: &Tensor| operator(&halved(a).to_kind(F32), &halved(b).to_kind(F32));
            assert_eq!(found[0].kind(), F32, "{name}");
            assert_eq!(found, computed(device, by_hand), "{name}");
        }
    });
    assert_eq!(seen(), OUTSIDE);
}

/// The gradients of `f` and those of a penalty on them, all of them within `region`.
fn differentiated(
    device: Device,
    region: Autocast,
    f: impl Fn(&Tensor, &Tensor) -> Tensor,
) -> [Tensor; 4] {
    let (a, b) = (random_on(device, 1), random_on(device, 2));
    let first = region.run(|| {
        let loss = f(&a, &b).to_kind(F32).square().sum(F32);
        let config = GradConfig { create_graph: true, ..Default::default() };
        let first: Vec<_> =
            grad(&[loss], &[&a, &b], &config).unwrap().into_iter().flatten().collect();
        let penalty: Tensor = first.iter().map(|g| g.to_kind(F32).square().sum(F32)).sum();
        penalty.backward();
        first
    });
    let first = first.unwrap();
    [first[0].detach(), first[1].detach(), a.grad(), b.grad()]
}

/// A backward pass inside of the region has autocast on, which would cast the products in it, and so has one inside of
/// a custom function. This holds for second derivatives, too.
#[test]
fn operators_stay_in_f32_in_a_backward_pass_inside_of_the_region() {
    let products: [(&str, Operator); 6] = [
        ("matmul", |a, b| a.matmul(b)),
        ("linear", |a, b| a.linear(b, Some(b.select(0, 0)))),
        ("addmm", |a, b| a.addmm(a, b)),
        ("bmm", |a, b| a.unsqueeze(0).bmm(&b.unsqueeze(0))),
        ("conv2d", |a, b| {
            a.view([1, 2, 2, 4]).conv2d(&b.view([2, 2, 2, 2]), None::<Tensor>, 1, 0, 1, 1)
        }),
        ("linalg_inv", |a, b| Tensor::linalg_inv(&(a + b + Tensor::eye(4, (F32, a.device())) * 9))),
    ];
    for_each_device(|device| {
        // Null CUDA has no cuSOLVER.
        let lacks = |name| name == "linalg_inv" && device != Device::Cpu && lacks_libraries();
        for (name, operator) in products.into_iter().filter(|(name, _)| !lacks(*name)) {
            let off = Autocast::new(device).enabled(false);
            let expected = differentiated(device, off, operator);
            let kept = Autocast::new(device).dtype(BF16).keep_in_f32([name]);
            assert_eq!(differentiated(device, kept, operator), expected, "{name} on {device:?}");
            // Elsewhere autocast casts them.
            if name != "linalg_inv" {
                let plain = Autocast::new(device).dtype(BF16);
                assert_ne!(
                    differentiated(device, plain, operator),
                    expected,
                    "{name} on {device:?}"
                );
            }
        }
    });
    assert_eq!(seen(), OUTSIDE);
}

/// Its backward runs an operator that another rule of the region would cast.
#[test]
fn a_rule_for_half_precision_does_not_reach_the_backward_of_one_in_f32() {
    for_each_device(|device| {
        let gradient = |region: Autocast| {
            let x = random_on(device, 1);
            region.run(|| x.exp().sum(F32).backward()).unwrap();
            x.grad()
        };
        let kept = Autocast::new(device).dtype(BF16).keep_in_f32(["exp"]).prefer_half(["mul"]);
        assert_eq!(gradient(kept), gradient(Autocast::new(device).enabled(false)));
    });
}

#[test]
fn operators_run_in_half_precision_forward_and_backward() {
    for_each_device(|device| {
        for (name, operator) in OPERATORS {
            let region = Autocast::new(device).dtype(BF16).prefer_half([format!("aten::{name}")]);
            let found = computed(device, |a, b| region.run(|| operator(a, b)).unwrap());
            let by_hand = |a: &Tensor, b: &Tensor| operator(&halved(a), &halved(b));
            assert_eq!(found[0].kind(), BF16, "{name}");
            assert_eq!(found, computed(device, by_hand), "{name}");
        }
    });
}

#[test]
fn other_operators_and_dtypes_are_untouched() {
    let x = random(3);
    let overridden = region().prefer_half(["exp", "add"]).keep_in_f32(["softmax"]);
    let kinds = |f: &dyn Fn() -> Tensor| {
        (region().run(f).unwrap().kind(), overridden.run(f).unwrap().kind())
    };
    assert_eq!(kinds(&|| x.matmul(&x)), (BF16, BF16));
    assert_eq!(kinds(&|| x.tanh()), (F32, F32));
    assert_eq!(kinds(&|| x.to_kind(Kind::Double).exp()), (Kind::Double, Kind::Double));
    let whole = Tensor::ones([2], (Kind::Int64, Device::Cpu));
    assert_eq!(kinds(&|| whole.g_add(&whole)), (Kind::Int64, Kind::Int64));
    // In place, an operator cannot change its dtype.
    assert_eq!(kinds(&|| tch::no_grad(|| x.copy().exp_())), (F32, F32));
    // Operators without tensors of the device.
    assert_eq!(kinds(&|| Tensor::zeros([2], (F32, Device::Cpu))), (F32, F32));
}

fn kind_of_exp(x: &Tensor) -> Kind {
    x.exp().kind()
}

/// The last call wins, regions inside inherit, and each is restored when it ends.
#[test]
fn regions_inside_inherit_and_override() {
    let x = random(4);
    let half = region().keep_in_f32(["exp"]).prefer_half(["exp", "sin"]);
    assert_eq!(kind_of_exp(&x), F32);
    half.run(|| {
        assert_eq!(kind_of_exp(&x), BF16);
        region().run(|| assert_eq!(kind_of_exp(&x), BF16)).unwrap();
        let exact = region().keep_in_f32(["exp"]).run(|| {
            assert_eq!((x.to_kind(BF16).exp().kind(), x.sin().kind()), (F32, BF16));
        });
        exact.unwrap();
        region().enabled(false).run(|| assert_eq!(kind_of_exp(&x), F32)).unwrap();
        assert_eq!((kind_of_exp(&x), x.sin().kind()), (BF16, BF16));
    })
    .unwrap();
    assert_eq!(kind_of_exp(&x), F32);
    region().run(|| assert_eq!(kind_of_exp(&x), F32)).unwrap();
}

/// The region with a plan of one rule.
fn planned(region: Autocast, rule: Rule) -> Autocast {
    let plan = Plan { dtype: Some(BF16), rules: vec![rule], ..Plan::new(Device::Cpu).unwrap() };
    region.plan(&plan).unwrap()
}

/// All orders of some numbers.
fn orders(numbers: &[usize]) -> Vec<Vec<usize>> {
    if numbers.is_empty() {
        return vec![Vec::new()];
    }
    let after = |&first: &usize| {
        let rest: Vec<_> = numbers.iter().copied().filter(|&other| other != first).collect();
        let rest = orders(&rest).into_iter();
        rest.map(move |rest| [vec![first], rest].concat())
    };
    numbers.iter().flat_map(after).collect()
}

type Call = fn(Autocast) -> Autocast;

#[test]
fn no_call_of_the_builder_forgets_the_rules_of_another() {
    let calls: [(Call, Function, Kind); 5] = [
        (|region| region.keep_in_f32(["exp"]), Tensor::exp, F32),
        (|region| region.prefer_half(["sin"]), Tensor::sin, BF16),
        (|region| planned(region, Rule::new("tanh", RunAs::F32)), Tensor::tanh, F32),
        (|region| planned(region, Rule::new("cos", RunAs::Half)), Tensor::cos, BF16),
        (|region| region.dtype(BF16).enabled(true).cache(false), |x| x.matmul(x), BF16),
    ];
    let x = random(14);
    for order in orders(&[0, 1, 2, 3, 4]) {
        let region = order.iter().fold(region(), |region, &place| calls[place].0(region));
        for (_, operator, kind) in calls {
            // Without the rule, it would have the dtype of its input.
            let input = if kind == F32 { halved(&x) } else { x.shallow_clone() };
            let found = region.run(|| operator(&input)).unwrap().kind();
            assert_eq!(found, kind, "{order:?}");
        }
    }
}

#[test]
fn the_last_call_for_an_operator_wins_whichever_it_is() {
    let calls: [(Call, Kind); 4] = [
        (|region| region.keep_in_f32(["exp"]), F32),
        (|region| region.prefer_half(["exp"]), BF16),
        (|region| planned(region, Rule::new("exp", RunAs::F32)), F32),
        (|region| planned(region, Rule::new("exp", RunAs::Half)), BF16),
    ];
    let x = random(15);
    for order in orders(&[0, 1, 2, 3]) {
        for count in 1..=order.len() {
            let made = order[..count].iter();
            let region = made.fold(region(), |region, &place| calls[place].0(region));
            let last = calls[order[count - 1]].1;
            for input in [&x, &halved(&x)] {
                assert_eq!(region.run(|| kind_of_exp(input)).unwrap(), last, "{order:?}, {count}");
            }
        }
    }
    // A rule for some sizes leaves the others to the calls before it.
    let small = |run_as| Rule { below: Some(8), ..Rule::new("exp", run_as) };
    let kinds =
        |region: Autocast| region.run(|| [kind_of_exp(&x), kind_of_exp(&x.select(0, 0))]).unwrap();
    assert_eq!(kinds(planned(region().keep_in_f32(["exp"]), small(RunAs::Half))), [F32, BF16]);
    assert_eq!(kinds(planned(region().prefer_half(["exp"]), small(RunAs::F32))), [BF16, F32]);
    assert_eq!(kinds(planned(region(), small(RunAs::F32)).prefer_half(["exp"])), [BF16; 2]);
}

#[test]
fn guards_in_any_order_and_panics_restore_the_lists() {
    let x = random(5);
    let outer = region().prefer_half(["exp"]).enter().unwrap();
    let inner = region().keep_in_f32(["exp"]).enter().unwrap();
    drop(outer);
    assert_eq!(x.to_kind(BF16).exp().kind(), F32);
    drop(inner);
    assert_eq!(x.to_kind(BF16).exp().kind(), BF16);
    assert_eq!(kind_of_exp(&x), F32);

    let panicking = || region().prefer_half(["exp"]).run(|| panic!("on purpose")).unwrap();
    assert!(std::panic::catch_unwind(panicking).is_err());
    assert_eq!(kind_of_exp(&x), F32);
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn other_threads_are_unaffected_and_can_enter_the_state() {
    let region = region().prefer_half(["exp"]);
    region
        .run(|| {
            let state = AutocastState::current().unwrap();
            std::thread::spawn(move || {
                let x = random(6);
                assert_eq!(kind_of_exp(&x), F32);
                Autocast::new(Device::Cpu).run(|| assert_eq!(kind_of_exp(&x), F32)).unwrap();
                state.run(|| assert_eq!(kind_of_exp(&x), BF16)).unwrap();
                assert_eq!(kind_of_exp(&x), F32);
            })
            .join()
            .unwrap();
        })
        .unwrap();
}

/// Operators get their kernel when a region first names them, also while other threads run them. In a region that names
/// others they are as they were.
#[test]
fn operators_that_are_named_elsewhere_meanwhile_are_unaffected() {
    const NAMES: [&str; 6] = ["erfinv", "cosh", "sinh", "lgamma", "digamma", "erfc"];
    let operators = |x: &Tensor| {
        [x.erfinv(), x.cosh(), x.sinh(), x.lgamma(), x.digamma(), x.erfc()].map(|y| y.kind())
    };
    let share = || Tensor::full([4], 0.5, (F32, Device::Cpu));
    let (begun, ends) = (Barrier::new(2), AtomicBool::new(false));
    let named = std::thread::scope(|scope| {
        let runs = scope.spawn(|| {
            let x = share();
            let mut all = Vec::new();
            region().prefer_half(["exp"]).run(|| {
                begun.wait();
                while !ends.load(Relaxed) {
                    all.push((operators(&x), kind_of_exp(&x)));
                }
            })?;
            Ok::<_, Error>(all)
        });
        begun.wait();
        let named = NAMES.map(|name| {
            std::thread::sleep(Duration::from_millis(2));
            region().prefer_half([name]).run(|| operators(&share()))
        });
        ends.store(true, Relaxed);
        let all = runs.join().unwrap().unwrap();
        assert!(all.iter().all(|kinds| *kinds == ([F32; 6], BF16)), "of {}", all.len());
        named
    });
    for (i, kinds) in named.into_iter().enumerate() {
        let is_half = kinds.unwrap().map(|kind| kind == BF16);
        assert_eq!(is_half, std::array::from_fn(|k| k == i), "{}", NAMES[i]);
    }
    region().prefer_half(["exp"]).run(|| assert_eq!(operators(&share()), [F32; 6])).unwrap();
}

/// A weight is cast once for all its uses in a region.
#[test]
fn casts_of_weights_are_cached() {
    let weight = random(8);
    let x = random(9).detach();
    let region = region().prefer_half(["mul"]);
    let results = region.run(|| {
        let first = &x * &weight;
        // Not seen by the cache.
        let _changed = weight.data().fill_(0);
        (first, &x * &weight)
    });
    let (first, second) = results.unwrap();
    assert_eq!(first, second);
}

#[test]
fn what_cannot_be_overridden_is_refused() {
    let error = |name: &str| refusal(region().keep_in_f32([name]));
    for name in ["no_such_operator", "add.Tensor", "", "extension::scan", "a\0b"] {
        let error = error(name);
        assert!(matches!(error, AutocastError::UnknownOperator { .. }), "{name}: {error}");
    }
    for name in ["add_", "view", "transpose", "zeros", "_local_scalar_dense_"] {
        let error = error(name);
        let is_named = error.to_string().contains(name);
        let is_refused = match name {
            "_local_scalar_dense_" => matches!(error, AutocastError::UnknownOperator { .. }),
            _ => matches!(error, AutocastError::NotOverridable { .. }),
        };
        assert!(is_named && is_refused, "{name}: {error}");
    }
    // Nothing was opened.
    assert_eq!(seen(), OUTSIDE);
    assert_eq!(kind_of_exp(&random(10)), F32);
}

/// A call of a normalization with its parameters, its running statistics, and whether it trains.
type Normalization = fn(&Tensor, [&Tensor; 2], [&Tensor; 2], bool) -> Tensor;

/// The normalizations whose schemas do not say that they write running statistics.
const NORMALIZATIONS: &[(&str, Normalization)] = &[
    ("batch_norm", |x, [w, b], [mean, var], train| {
        x.batch_norm(Some(w), Some(b), Some(mean), Some(var), train, 0.1, 1e-5, false)
    }),
    ("native_batch_norm", |x, [w, b], [mean, var], train| {
        x.native_batch_norm(Some(w), Some(b), Some(mean), Some(var), train, 0.1, 1e-5).0
    }),
    // `batch_norm` calls it, and tch does not.
    ("_batch_norm_impl_index", |x, [w, b], [mean, var], train| {
        x.batch_norm(Some(w), Some(b), Some(mean), Some(var), train, 0.1, 1e-5, false)
    }),
    ("instance_norm", |x, [w, b], [mean, var], train| {
        x.instance_norm(Some(w), Some(b), Some(mean), Some(var), train, 0.1, 1e-5, false)
    }),
    ("batch_norm_update_stats", |x, _, [mean, var], train| {
        if train {
            let _both = x.batch_norm_update_stats(Some(mean), Some(var), 0.1);
        }
        x.shallow_clone()
    }),
];

/// They exist on GPUs only, or only read the statistics.
const NOT_TESTED: &[&str] = &[
    "_batch_norm_impl_index_backward",
    "_batch_norm_no_update",
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "batch_norm_backward",
    "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm",
    "miopen_batch_norm_backward",
    "native_batch_norm_backward",
];

#[test]
fn every_normalization_is_known() {
    let Some(oracle) = Oracle::find("running_statistics.py") else { return };
    let found = oracle.run(&[], "");
    let names = found.lines().filter_map(|name| name.strip_prefix("aten::"));
    let known = |name: &&str| {
        NORMALIZATIONS.iter().any(|(known, _)| known == name) || NOT_TESTED.contains(name)
    };
    let unknown: Vec<_> = names.filter(|name| !known(name)).collect();
    assert!(found.contains("aten::batch_norm\n") && unknown.is_empty(), "{unknown:?}");
}

/// The statistics after training on batches of `kind`, from a loop in f64.
fn statistics_of(batches: &[Tensor], per_instance: bool) -> [Vec<f64>; 2] {
    let (mut mean, mut var) = ([0.0; 3], [1.0; 3]);
    for x in batches {
        let instances = if per_instance { x.size()[0] } else { 1 };
        for channel in 0..3 {
            let (mut means, mut vars) = (0.0, 0.0);
            for instance in 0..instances {
                let x = if per_instance { x.narrow(0, instance, 1) } else { x.shallow_clone() };
                let numbers = to_f64(&x.select(1, channel as i64));
                let count = numbers.len() as f64;
                let own = numbers.iter().sum::<f64>() / count;
                let squares: f64 = numbers.iter().map(|x| (x - own) * (x - own)).sum();
                means += own / instances as f64;
                vars += squares / (count - 1.0) / instances as f64;
            }
            mean[channel] = 0.9 * mean[channel] + 0.1 * means;
            var[channel] = 0.9 * var[channel] + 0.1 * vars;
        }
    }
    [mean.to_vec(), var.to_vec()]
}

/// The running statistics of an overridden normalization are those of its input.
#[test]
fn running_statistics_are_kept() {
    for_each_device(|device| {
        tch::manual_seed(11);
        let batch = |_| Tensor::randn([4, 3, 5], (F32, Device::Cpu)) + 10.0;
        let batches: Vec<_> = (0..50).map(|i| batch(i).to_device(device)).collect();
        for (name, call) in NORMALIZATIONS {
            let gpu_only = *name == "batch_norm_update_stats" && device != Device::Cpu;
            if gpu_only {
                continue;
            }
            for half in [true, false] {
                let region = Autocast::new(device).dtype(BF16);
                let region = match half {
                    true => region.prefer_half([name]),
                    false => region.keep_in_f32([name]),
                };
                let seen = |x: &Tensor| if half { x.to_kind(BF16) } else { x.to_kind(F32) };
                let numbers = |value: f64| Tensor::full([3], value, (F32, device));
                let parameters = [numbers(1.5), numbers(0.5)].map(|p| p.set_requires_grad(true));
                let [mean, var] = [numbers(0.0), numbers(1.0)];
                let call = |x: &Tensor, train| {
                    let parameters = parameters.each_ref();
                    region.run(|| call(x, parameters, [&mean, &var], train)).unwrap()
                };
                for x in &batches {
                    let ys = call(x, true);
                    if *name != "batch_norm_update_stats" {
                        assert_eq!(ys.kind(), if half { BF16 } else { F32 }, "{name}");
                        ys.sum(F32).backward();
                    }
                }
                let rounded: Vec<_> = batches.iter().map(seen).collect();
                let [wanted_mean, wanted_var] = statistics_of(&rounded, *name == "instance_norm");
                for (found, wanted) in [(&mean, wanted_mean), (&var, wanted_var)] {
                    for (found, wanted) in to_f64(found).into_iter().zip(wanted) {
                        let error = (found - wanted).abs();
                        assert!(error < 1e-5 * wanted, "{name}, half: {half}: {found}, {wanted}");
                    }
                }
                // Evaluation reads them.
                let [before, variance] = [to_f64(&mean), to_f64(&var)];
                let ys = call(&batches[0], false);
                assert_eq!([to_f64(&mean), to_f64(&var)], [before.clone(), variance.clone()]);
                if *name != "batch_norm_update_stats" {
                    let x = to_f64(&seen(&batches[0]).select(1, 0));
                    let unit = if half { 1.0 / 128.0 } else { 1e-5 };
                    for (x, y) in x.into_iter().zip(to_f64(&ys.select(1, 0))) {
                        let wanted = (x - before[0]) / (variance[0] + 1e-5).sqrt() * 1.5 + 0.5;
                        let error = (y - wanted).abs();
                        assert!(error <= unit * wanted.abs().max(1.0), "{name}: {y}, {wanted}");
                    }
                }
            }
        }
    });
}

/// Statistics in half precision are computed in f32, and rounded where they are kept, as with casts by hand.
#[test]
fn running_statistics_in_half_precision_are_written_back() {
    for_each_device(|device| {
        for (name, call) in NORMALIZATIONS {
            if *name == "batch_norm_update_stats" && device != Device::Cpu {
                continue;
            }
            let numbers = |value: f64| Tensor::full([3], value, (BF16, device));
            let parameters = [numbers(1.5), numbers(0.5)];
            let ours = [numbers(0.0), numbers(1.0)];
            let mut theirs = [numbers(0.0), numbers(1.0)];
            let region = Autocast::new(device).dtype(BF16).keep_in_f32([name]);
            for i in 0..20 {
                tch::manual_seed(i);
                let x = (Tensor::randn([4, 3, 5], (F32, Device::Cpu)) + 10.0).to_kind(BF16);
                let x = x.to_device(device);
                let [w, b] = parameters.each_ref();
                let [mean, var] = ours.each_ref();
                let train = i % 4 != 3;
                let ys = region.run(|| call(&x, [w, b], [mean, var], train)).unwrap();
                let wide = |t: &Tensor| t.to_kind(F32);
                let [their_mean, their_var] = theirs.each_ref().map(wide);
                let by_hand =
                    call(&wide(&x), [&wide(w), &wide(b)], [&their_mean, &their_var], train);
                theirs = [their_mean.to_kind(BF16), their_var.to_kind(BF16)];
                if *name != "batch_norm_update_stats" {
                    assert_eq!(ys, by_hand, "{name}");
                }
            }
            assert_eq!(ours, theirs, "{name}");
            assert!(to_f64(&ours[0])[0] > 5.0, "{name}: the statistics have moved");
        }
    });
}

/// What an operator does to its inputs would be done to copies.
#[test]
fn operators_that_write_without_saying_so_are_refused() {
    for name in ["_copy_from", "_copy_from_and_resize", "_backward", "_propagate_xla_data"] {
        let error = refusal(region().prefer_half([name]));
        assert!(matches!(error, AutocastError::NotOverridable { .. }), "{name}: {error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

/// The correction that soft actor-critic adds to a log-probability for squashing an action by tanh, from the
/// half-precision output of a layer, and what a likelihood of a Bernoulli adds.
#[test]
fn log_probabilities_by_hand_are_those_of_f32() {
    let squashed = |x: &Tensor| (1i64 - x.tanh().square() + 1e-6).log();
    let complement = |x: &Tensor| (1i64 - x.sigmoid() + 1e-6).log() - x.softplus() * x.exp();
    let losses: [&dyn Fn(&Tensor) -> Tensor; 2] = [&squashed, &complement];
    for_each_device(|device| {
        let outputs = (Tensor::arange(61, (F32, device)) / 10.0 - 3.0).to_kind(BF16);
        for loss in losses {
            let exact = loss(&outputs.to_kind(F32));
            let error = |region: Autocast| {
                let log = region.dtype(BF16).run(|| loss(&outputs)).unwrap().to_kind(F32);
                let difference = ((log - &exact) / &exact).abs().max();
                difference.double_value(&[])
            };
            let plain = error(Autocast::new(device));
            let kept = error(Autocast::new(device).keep_in_f32(LOG_PROBABILITIES));
            assert!(kept < 1e-6 && plain > 1e-3, "{device:?}: {plain} and {kept}");
        }
    });
}

/// A call of each operator of `LOG_PROBABILITIES`.
const LOGS: [(&str, Function); 18] = [
    ("atanh", Tensor::atanh),
    ("exp", Tensor::exp),
    ("exp2", Tensor::exp2),
    ("expm1", Tensor::expm1),
    ("log", Tensor::log),
    ("log10", Tensor::log10),
    ("log1p", Tensor::log1p),
    ("log2", Tensor::log2),
    ("log_sigmoid", Tensor::log_sigmoid),
    ("log_softmax", |x| x.log_softmax(-1, None::<Kind>)),
    ("logaddexp", |x| x.logaddexp(&x.detach())),
    ("logit", |x| x.logit(None::<f64>)),
    ("logsumexp", |x| x.logsumexp([-1].as_slice(), false)),
    ("pow", |x| x.pow_tensor_scalar(3)),
    ("sigmoid", Tensor::sigmoid),
    ("softmax", |x| x.softmax(-1, None::<Kind>)),
    ("softplus", Tensor::softplus),
    ("tanh", Tensor::tanh),
];

/// `softmax` alone is left in half precision, by the switch of a run and with a plan as well.
#[test]
fn the_switch_of_a_run_keeps_every_log_probability_in_f32_on_the_cpu() {
    assert_eq!(LOGS.map(|(name, _)| name), LOG_PROBABILITIES);
    let shares = Tensor::arange(12, (F32, Device::Cpu)).view([3, 4]) / 13.0 + 0.05;
    for (amp, dtype) in [(Amp::Bf16, BF16), (Amp::Fp16, Kind::Half)] {
        let plain = amp.on(Device::Cpu).unwrap();
        let rules = vec![Rule::new("sin", RunAs::F32)];
        let plan = Plan { dtype: Some(dtype), rules, ..Plan::new(Device::Cpu).unwrap() };
        let planned = plain.clone().plan(&plan).unwrap();
        let after_off = Amp::Off.on(Device::Cpu).unwrap().plan(&plan).unwrap();
        for amp in [plain, planned, after_off] {
            for (name, operator) in LOGS {
                let compute = |f: &dyn Fn(&Tensor) -> Tensor| {
                    let x = shares.to_kind(dtype).set_requires_grad(true);
                    let result = f(&x);
                    result.to_kind(F32).square().sum(F32).backward();
                    (result.detach(), x.grad())
                };
                let kind = if name == "softmax" { dtype } else { F32 };
                let found = compute(&|x| amp.autocast(|| operator(x)).unwrap());
                let expected = compute(&|x| operator(&x.to_kind(kind)));
                assert_eq!((found.0.kind(), &found), (kind, &expected), "{name}: {amp}");
            }
        }
    }
}
