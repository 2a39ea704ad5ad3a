//! The statistics of batch normalization for averaged weights.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::{Value, json};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::average::Swa;
use tch_amp::{Autocast, Error};

use super::{random, set};
use testkit::python::Oracle;
use testkit::rng::Rng;
use testkit::tensors::{Tie, tie};
use testkit::{for_each_device, gpus_that_round_as_the_cpu, to_f64};

/// A linear layer before a normalization, so that the statistics depend on the averaged weights.
fn network() -> (VarStore, nn::SequentialT) {
    let vs = VarStore::new(Device::Cpu);
    let net = nn::seq_t()
        .add(nn::linear(vs.root() / "linear", 4, 3, Default::default()))
        .add(nn::batch_norm1d(vs.root() / "norm", 3, Default::default()));
    (vs, net)
}

#[test]
fn the_statistics_are_the_means_of_the_batches() {
    tch::manual_seed(2);
    let (vs, net) = network();
    let mut swa = Swa::default().build(&vs).unwrap();
    let weight = vs.variables()["linear.weight"].shallow_clone();
    for factor in [1.0, 3.0] {
        drop(tch::no_grad(|| weight.shallow_clone().g_mul_(&Tensor::from(factor as f32))));
        swa.advance().unwrap();
    }
    let mean = swa.average("linear.weight").unwrap();
    let bias = vs.variables()["linear.bias"].detach();
    let batches: Vec<_> = (0..5)
        .map(|i| Tensor::randn([16, 4], (Kind::Float, Device::Cpu)) * (1.0 + i as f64))
        .collect();
    swa.update_batch_norm(0.1, &batches, |xs| Ok(net.forward_t(xs, true))).unwrap();

    let outputs: Vec<_> = batches.iter().map(|xs| xs.linear(&mean, Some(&bias))).collect();
    let average = |of: &dyn Fn(&Tensor) -> Tensor| {
        let all: Vec<_> = outputs.iter().map(of).collect();
        Tensor::stack(&all, 0).mean_dim(0, false, Kind::Double)
    };
    let means = average(&|ys| ys.mean_dim(0, false, Kind::Double));
    let variances = average(&|ys| ys.to_kind(Kind::Double).var_dim(0, true, false));
    let near = |name: &str, expected: &Tensor| {
        let ours = vs.variables()[name].to_kind(Kind::Double);
        // f32 statistics of 16 numbers, of which the layer keeps a tenth.
        let distance = (&ours - expected).abs() / (expected.abs() + 1.0);
        assert!(distance.max().double_value(&[]) < 1e-5, "{name}: {ours} is not {expected}");
    };
    let own = vs.variables()["norm.running_mean"].copy();
    {
        let _swapped = swa.swap_in().unwrap();
        near("norm.running_mean", &means);
        near("norm.running_var", &variances);
    }
    assert_eq!(own, Tensor::zeros([3], (Kind::Float, Device::Cpu)));
    assert_eq!(vs.variables()["norm.running_mean"], own);
}

#[test]
fn a_failure_leaves_the_statistics_as_they_were() {
    let (vs, net) = network();
    let mut swa = Swa::default().build(&vs).unwrap();
    let xs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    swa.update_batch_norm(0.1, [&xs], |xs| Ok(net.forward_t(xs, true))).unwrap();
    let statistics = |swa: &mut tch_amp::average::AveragedWeights| {
        let _swapped = swa.swap_in().unwrap();
        vs.variables()["norm.running_var"].copy()
    };
    let before = statistics(&mut swa);
    let others = || [&xs * 2.0, &xs * 3.0];
    let fails = |xs: Tensor| {
        drop(net.forward_t(&xs, true));
        Err(Error::Torch("no".to_owned()))
    };
    swa.update_batch_norm(0.1, others(), fails).unwrap_err();
    assert_eq!(statistics(&mut swa), before);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        swa.update_batch_norm(0.1, others(), |_| panic!("the forward pass fails"))
    }));
    assert!(panicked.is_err());
    assert_eq!(statistics(&mut swa), before);
    assert!(net.forward_t(&xs, true).requires_grad(), "gradients are recorded again");
    let none: [Tensor; 0] = [];
    let error = swa.update_batch_norm(0.1, none, |xs| Ok(net.forward_t(&xs, true))).unwrap_err();
    assert!(error.to_string().contains("no batch"), "{error}");
    assert_eq!(statistics(&mut swa), before);
}

const CHANNELS: i64 = 3;

/// A normalization whose variables are those of PyTorch's layers.
#[derive(Debug)]
struct Layer {
    mean: Tensor,
    variance: Tensor,
    is_of_instances: bool,
    trains: bool,
    momentum: f64,
}

impl Layer {
    fn forward(&self, xs: &Tensor) -> Tensor {
        let (none, mean, variance) = (None::<&Tensor>, Some(&self.mean), Some(&self.variance));
        if self.is_of_instances {
            let (trains, momentum) = (self.trains, self.momentum);
            return xs.instance_norm(none, none, mean, variance, trains, momentum, 1e-5, true);
        }
        xs.batch_norm(none, none, mean, variance, self.trains, self.momentum, 1e-5, true)
    }
}

/// A random model and what its layers are called with, as `oracle/batch_norm.py` reads it.
fn random_case(rng: &mut Rng) -> Value {
    let list = |rng: &mut Rng, count: i64| -> Vec<f64> {
        random(rng, count).into_iter().map(|number| f64::from(number as f32)).collect()
    };
    let layers: Vec<_> = (0..1 + rng.below(4))
        .map(|place| {
            let is_of_instances = rng.below(4) == 0;
            let momentum = *rng.pick(&[Some(0.1), Some(0.3), Some(1.0), Some(0.0), None]);
            // Layers of one kind share statistics in PyTorch as well.
            let shared = (place > 0 && !is_of_instances && rng.below(4) == 0).then_some(0);
            let variance: Vec<f64> = list(rng, CHANNELS).iter().map(|x| x.abs() + 0.5).collect();
            json!({
                "momentum": momentum, "instances": is_of_instances && place > 0, "trains": rng.below(4) > 0,
                "mean": list(rng, CHANNELS), "variance": variance, "as": shared,
            })
        })
        .collect();
    let count = layers.len();
    let batches: Vec<Vec<_>> = (0..1 + rng.below(4))
        .map(|_| {
            // None, one or several calls of each layer.
            (0..rng.below(2 * count + 1))
                .map(|_| (rng.below(count), list(rng, 2 * CHANNELS * 4)))
                .collect()
        })
        .collect();
    json!({ "layers": layers, "batches": batches })
}

/// The mean, the variance and the number of batches of each layer, and the outputs of all calls.
type Updated = (Vec<(Vec<f64>, Vec<f64>, i64)>, Vec<Vec<f64>>);

/// Does what the oracle does, and returns the same.
fn updated(case: &Value, device: Device) -> Updated {
    let numbers = |value: &Value| -> Tensor {
        let numbers: Vec<f64> = serde_json::from_value(value.clone()).unwrap();
        Tensor::from_slice(&numbers).to_kind(Kind::Float).to_device(device)
    };
    let vs = VarStore::new(device);
    let _trainable = vs.root().ones("w", &[1]);
    let name = |place: usize, last: &str| format!("{place}.{last}");
    let mut layers: Vec<Layer> = Vec::new();
    for (place, options) in case["layers"].as_array().unwrap().iter().enumerate() {
        let path = vs.root() / place;
        let [mean, variance] = if let Some(first) = options["as"].as_u64() {
            for last in ["running_mean", "running_var", "num_batches_tracked"] {
                let variable = vs.variables()[&name(first as usize, last)].shallow_clone();
                tie(&vs, Tie::Insert, &name(place, last), &variable);
            }
            let first = &layers[first as usize];
            [first.mean.shallow_clone(), first.variance.shallow_clone()]
        } else {
            let count = Tensor::full([], 77, (Kind::Int64, device));
            let _count = path.add("num_batches_tracked", count, false);
            [("running_mean", "mean"), ("running_var", "variance")]
                .map(|(name, of)| path.add(name, numbers(&options[of]), false))
        };
        layers.push(Layer {
            mean,
            variance,
            is_of_instances: options["instances"].as_bool().unwrap(),
            trains: options["trains"].as_bool().unwrap(),
            momentum: options["momentum"].as_f64().unwrap_or(0.0),
        });
    }
    let state = || {
        let variables = vs.variables();
        let of = |place: usize, last: &str| to_f64(&variables[&name(place, last)]);
        let places = 0..layers.len();
        let state = places.map(|place| {
            let count = of(place, "num_batches_tracked")[0] as i64;
            (of(place, "running_mean"), of(place, "running_var"), count)
        });
        state.collect::<Vec<_>>()
    };
    let before = state();
    let mut outputs = Vec::new();
    let mut swa = Swa::default().build(&vs).unwrap();
    let batches = case["batches"].as_array().unwrap();
    swa.update_batch_norm(0.1, batches, |calls| {
        for call in calls.as_array().unwrap() {
            let xs = numbers(&call[1]).view([2, CHANNELS, 4]);
            outputs.push(to_f64(&layers[call[0].as_u64().unwrap() as usize].forward(&xs)));
        }
        Ok(Tensor::new())
    })
    .unwrap();
    assert_eq!(state(), before, "the model keeps its own");
    let _swapped = swa.swap_in().unwrap();
    (state(), outputs)
}

#[test]
fn random_models_have_the_bits_of_update_bn() {
    let Some(oracle) = Oracle::find("batch_norm.py") else { return };
    let mut rng = Rng::new(11);
    let cases: Vec<_> = (0..200).map(|_| random_case(&mut rng)).collect();
    let printed = oracle.run(&[], &json!(cases).to_string());
    let theirs: Vec<Updated> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), cases.len());
    let devices = [Device::Cpu].into_iter().chain(gpus_that_round_as_the_cpu());
    for device in devices {
        for (case, (theirs, outputs)) in cases.iter().zip(&theirs) {
            let layers = case["layers"].as_array().unwrap();
            let (mut ours, our_outputs) = updated(case, device);
            for (place, layer) in layers.iter().enumerate() {
                if layer["instances"] != true {
                    continue;
                }
                let batches = case["batches"].as_array().unwrap().iter();
                let mut calls = batches.flat_map(|calls| calls.as_array().unwrap());
                if calls.any(|call| call[0] == place) {
                    // update_bn does not reset the count, with which the oracle's layer begins at 0.
                    assert_eq!((ours[place].2, theirs[place].2), (77, 0));
                    ours[place].2 = 0;
                } else {
                    // Nothing tells a layer that is never called from one of batch normalization.
                    assert_eq!(ours[place], (vec![0.0; 3], vec![1.0; 3], 0));
                    ours[place] = theirs[place].clone();
                }
            }
            assert_eq!(&ours, theirs, "{device:?}: {case}");
            assert_eq!(&our_outputs, outputs, "{device:?}: {case}");
        }
    }
}

/// The mean and the unbiased variance of numbers.
fn moments(numbers: &[f64]) -> [f64; 2] {
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    [mean, numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0)]
}

/// A layer that is called twice with each batch, one that every second batch reaches, and one that none does, each with a
/// momentum of its own.
#[test]
fn a_layers_statistics_are_the_means_of_its_calls() {
    for_each_device(|device| {
        let vs = VarStore::new(device);
        let _trainable = vs.root().ones("w", &[1]);
        let layer = |name: &str, momentum| {
            let config = nn::BatchNormConfig { momentum, affine: false, ..Default::default() };
            nn::batch_norm1d(vs.root() / name, 1, config)
        };
        let (twice, half, _never) = (layer("twice", 0.7), layer("half", 0.2), layer("never", 0.1));
        let mut rng = Rng::new(5);
        let batches: Vec<_> = (0..6).map(|_| random(&mut rng, 8)).collect();
        let tensor = |numbers: &[f64]| {
            Tensor::from_slice(numbers).to_kind(Kind::Float).to_device(device).view([-1, 1])
        };
        let mut swa = Swa::default().build(&vs).unwrap();
        swa.update_batch_norm(0.1, batches.iter().enumerate(), |(place, batch)| {
            let xs = tensor(batch);
            drop(twice.forward_t(&xs, true));
            if place % 2 == 1 {
                drop(half.forward_t(&xs, true));
            }
            // In evaluation a layer counts no call.
            drop(half.forward_t(&xs, false));
            Ok(twice.forward_t(&(xs * 3.0), true))
        })
        .unwrap();
        let of_calls = |calls: Vec<Vec<f64>>| {
            let all: Vec<_> = calls.iter().map(|call| moments(call)).collect();
            let mean = |part: usize| all.iter().map(|m| m[part]).sum::<f64>() / all.len() as f64;
            [mean(0), mean(1)]
        };
        let tripled = |batch: &Vec<f64>| batch.iter().map(|x| 3.0 * x).collect::<Vec<_>>();
        let both = batches.iter().flat_map(|batch| [batch.clone(), tripled(batch)]).collect();
        let second = batches.iter().skip(1).step_by(2).cloned().collect();
        let _swapped = swa.swap_in().unwrap();
        for (name, [mean, variance]) in
            [("twice", of_calls(both)), ("half", of_calls(second)), ("never", [0.0, 1.0])]
        {
            for (last, expected) in [("running_mean", mean), ("running_var", variance)] {
                let ours = to_f64(&vs.variables()[&format!("{name}.{last}")])[0];
                // f32 sums of a dozen numbers.
                let distance = (ours - expected).abs() / (expected.abs() + 1.0);
                assert!(distance < 1e-5, "{name}.{last}: {ours} is not {expected}");
            }
        }
    });
}

/// A layer that updates its statistics by arithmetic of its own, in every second batch, and one that runs on another
/// thread.
#[test]
fn layers_that_are_not_seen_are_averaged_over_the_batches_that_reach_them() {
    let vs = VarStore::new(Device::Cpu);
    let _trainable = vs.root().ones("w", &[1]);
    let config = nn::BatchNormConfig { momentum: 0.25, affine: false, ..Default::default() };
    let [own, away] = ["own", "away"].map(|name| nn::batch_norm1d(vs.root() / name, 1, config));
    let update = |xs: &Tensor| {
        let variance = xs.var_dim([0].as_slice(), true, false);
        for (running, new) in [
            (&own.running_mean, xs.mean_dim([0].as_slice(), false, None)),
            (&own.running_var, variance),
        ] {
            drop(running.shallow_clone().lerp_(&new, 0.25));
        }
    };
    let batches = [[1.0, 1.5], [-1.0, 1.0], [4.0, 8.0], [2.0, 2.0]];
    let mut swa = Swa::default().build(&vs).unwrap();
    swa.update_batch_norm(0.25, batches.iter().enumerate(), |(place, batch)| {
        let xs = Tensor::from_slice(batch).to_kind(Kind::Float).view([2, 1]);
        if place % 2 == 1 {
            update(&xs);
        }
        let layer = Layer {
            mean: away.running_mean.shallow_clone(),
            variance: away.running_var.shallow_clone(),
            is_of_instances: false,
            trains: true,
            momentum: 0.25,
        };
        let there = xs.shallow_clone();
        std::thread::spawn(move || drop(layer.forward(&there))).join().unwrap();
        Ok(xs)
    })
    .unwrap();
    let _swapped = swa.swap_in().unwrap();
    for (layer, reached) in [(&own, vec![1, 3]), (&away, vec![0, 1, 2, 3])] {
        let all: Vec<_> = reached.iter().map(|&place| moments(&batches[place])).collect();
        let mean = |part: usize| all.iter().map(|m| m[part]).sum::<f64>() / all.len() as f64;
        for (part, running) in [&layer.running_mean, &layer.running_var].into_iter().enumerate() {
            let distance = (to_f64(running)[0] - mean(part)).abs();
            assert!(distance < 1e-5, "{running} is not {}", mean(part));
        }
    }
}

/// Regions with overrides, and a pass within a pass.
#[test]
fn calls_are_counted_in_every_region_and_afterwards_no_more() {
    let run = |region: &dyn Fn(&dyn Fn() -> Tensor) -> Tensor| {
        let mut rng = Rng::new(4);
        let [(vs, net), (inner_vs, inner_net)] = [(); 2].map(|()| {
            let (vs, net) = network();
            set(&vs.variables()["linear.weight"].view(-1), &random(&mut rng, 12));
            set(&vs.variables()["linear.bias"], &[0.0; 3]);
            (vs, net)
        });
        let mut swa = Swa::default().build(&vs).unwrap();
        let mut inner = Swa::default().build(&inner_vs).unwrap();
        let xs = Tensor::from_slice(&random(&mut rng, 64)).to_kind(Kind::Float).view([16, 4]);
        let factors = [1.0, 2.0, 5.0];
        swa.update_batch_norm(0.1, factors, |factor| {
            let xs = &xs * factor;
            let before = region(&|| net.forward_t(&xs, true));
            inner.update_batch_norm(0.1, [&xs], |xs| {
                drop(net.forward_t(xs, true));
                Ok(inner_net.forward_t(xs, true))
            })?;
            Ok(before)
        })
        .unwrap();
        drop(net.forward_t(&xs, true));
        let own = to_f64(&vs.variables()["norm.running_mean"]);
        let _swapped = [swa.swap_in().unwrap(), inner.swap_in().unwrap()];
        let of = |vs: &VarStore| to_f64(&vs.variables()["norm.running_mean"]);
        (own, of(&vs), of(&inner_vs))
    };
    let (own, mean, inner) = run(&|forward| forward());
    let overridden = Autocast::new(Device::Cpu).keep_in_f32(["linear", "batch_norm"]);
    for region in [Autocast::new(Device::Cpu).enabled(false), overridden] {
        let within = run(&|forward| region.run(forward).unwrap());
        assert_eq!(within, (own.clone(), mean.clone(), inner.clone()), "{region:?}");
    }
    // The ordinary momentum holds again: a tenth of one call.
    assert!(
        own.iter().zip(&mean).all(|(own, mean)| own.abs() < 0.5 * mean.abs()),
        "{own:?} {mean:?}"
    );
}

/// The statistics of a pass over two batches, of which `forward` runs the model on each.
fn passed(mut forward: impl FnMut(&dyn Fn())) -> Vec<f64> {
    let mut rng = Rng::new(9);
    let (vs, net) = network();
    set(&vs.variables()["linear.weight"].view(-1), &random(&mut rng, 12));
    set(&vs.variables()["linear.bias"], &random(&mut rng, 3));
    let xs = Tensor::from_slice(&random(&mut rng, 64)).to_kind(Kind::Float).view([16, 4]);
    let mut swa = Swa::default().build(&vs).unwrap();
    // Not the momentum of the layer: calls that are not counted would change the statistics.
    swa.update_batch_norm(0.5, [1.0, 3.0], |factor| {
        forward(&|| drop(net.forward_t(&(&xs * factor), true)));
        Ok(Tensor::new())
    })
    .unwrap();
    let _swapped = swa.swap_in().unwrap();
    ["norm.running_mean", "norm.running_var"].map(|name| to_f64(&vs.variables()[name])).concat()
}

/// Both have their calls answered by one kernel, which each needs for as long as it lasts.
#[test]
fn a_pass_and_a_region_with_overrides_end_in_any_order() {
    let region = Autocast::new(Device::Cpu).keep_in_f32(["exp"]);
    let half = Tensor::ones([2], (Kind::BFloat16, Device::Cpu));
    let is_overridden = || half.exp().kind() == Kind::Float;
    let plain = passed(|call| call());
    for round in 0..2 {
        // A region within the pass, before a call and around none.
        let beside = passed(|call| {
            region.run(|| assert!(is_overridden())).unwrap();
            call();
            assert!(!is_overridden());
        });
        assert_eq!(beside, plain, "a region before the call, {round}");
        let inside = passed(|call| {
            let off = Autocast::new(Device::Cpu).enabled(false);
            region.run(|| off.run(call).unwrap()).unwrap();
        });
        assert_eq!(inside, plain, "a region around the call, {round}");

        // A pass within the region, which ends well or with an error or a panic.
        let around = region.run(|| {
            let off = Autocast::new(Device::Cpu).enabled(false);
            let found = off.run(|| passed(|call| call())).unwrap();
            assert!(is_overridden(), "after a pass");
            let panicking = AssertUnwindSafe(|| passed(|_| panic!("on purpose")));
            assert!(catch_unwind(panicking).is_err());
            assert!(is_overridden(), "after a pass that panicked");
            found
        });
        assert_eq!(around.unwrap(), plain, "a region around the pass, {round}");
        assert!(!is_overridden());

        // Each begins first and ends first.
        let mut guard = Some(region.enter().unwrap());
        let left = passed(|call| {
            drop(guard.take());
            call();
            assert!(!is_overridden());
        });
        assert_eq!(left, plain, "a region that ends in the pass, {round}");
        let mut guard = None;
        let between = passed(|call| {
            drop(guard.take());
            call();
            guard = Some(region.enter().unwrap());
        });
        assert_eq!(between, plain, "a region that ends in the next batch, {round}");
        assert!(is_overridden(), "a region that outlives the pass");
        drop(guard);
        assert!(!is_overridden());

        // Neither concerns another thread.
        let apart = passed(|call| {
            let there = region;
            let elsewhere = std::thread::spawn(move || {
                let half = Tensor::ones([2], (Kind::BFloat16, Device::Cpu));
                there.run(|| half.exp().kind()).unwrap()
            });
            assert_eq!(elsewhere.join().unwrap(), Kind::Float);
            call();
        });
        assert_eq!(apart, plain, "a region on another thread, {round}");
        // A pass within the pass leaves the outer one and the region as they were.
        let nested = passed(|call| {
            assert_eq!(passed(|call| call()), plain);
            call();
            region
                .run(|| {
                    drop(passed(|_| ()));
                    assert!(is_overridden(), "after an inner pass");
                })
                .unwrap();
        });
        assert_eq!(nested, plain, "a pass within the pass, {round}");
    }
}
