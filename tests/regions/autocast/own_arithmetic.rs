//! What this crate computes itself obeys no region; see `testkit::own_arithmetic`.

use tch::nn::VarStore;
use tch::{CModule, Device, Kind, Tensor, no_grad};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::{Ema, Swa};
use tch_amp::buffers::{BufferSnapshot, check_buffers_finite};
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Rng};
use tch_amp::function::{GradConfig, grad};
use tch_amp::gradcheck::{gradcheck, gradgradcheck};
use tch_amp::gradients::{ClipNorm, clip_grad_norm, clip_grad_value};
use tch_amp::loss_scale::{
    DynamicLossScale, LossScale as _, StaticLossScale, all_finite, select_tree,
};
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, MomentDtype, Muon, Sgd};
use tch_amp::policy::KeepF32;
use tch_amp::scaler::{GradScalerConfig, PerLossScalers, SpikeConfig};
use tch_amp::{GradScaler, Policy, function, half, jit};

use testkit::descent::Descent;
use testkit::files::Folder;
use testkit::optimizers::{MASTERS, algorithms};
use testkit::own_arithmetic::{
    Job, assert_obeys_no_region, backward_of, inside, job, large, leaves, loss_of, sum_of,
};
use testkit::{for_each_device, to_f64};

const F32: Kind = Kind::Float;

fn gradients(list: &[Tensor]) -> Vec<Tensor> {
    list.iter().map(Tensor::grad).collect()
}

fn scaler(device: Device, scale: f64) -> GradScaler {
    GradScalerConfig { init_scale: scale, ..Default::default() }.build(device).unwrap()
}

const JOBS: &[Job] = &[
    job(
        "scaled losses and their gradients",
        &["tamp_scaled", "tamp_number_new", "tamp_backward"],
        |device, within, results| {
            for kind in [F32, Kind::Double, Kind::Half, Kind::BFloat16] {
                let scaler = scaler(device, 65536.0);
                let w = Tensor::from(2.7).to_device(device).to_kind(kind).set_requires_grad(true);
                within(&mut || {
                    let scaled = scaler.scale(&w).unwrap();
                    results.tensor(&scaled);
                    scaled.backward();
                    results.tensor(&w.grad());
                    scaler.backward_retain_graph(&w).unwrap();
                });
                results.tensor(&w.grad());
            }
        },
    ),
    job("second derivatives of scaled losses", &[], |device, within, results| {
        let scaler = scaler(device, 65537.0);
        let w = Tensor::from(2.7f32).to_device(device).set_requires_grad(true);
        let g = Tensor::from(1.1f32).to_device(device).set_requires_grad(true);
        within(&mut || {
            let scaled = scaler.scale(&w).unwrap();
            let seed = scaler.scale(&g).unwrap();
            let config = GradConfig { create_graph: true, ..Default::default() };
            let first = grad(&[scaled], &[&w], &config).unwrap();
            results.tensors(&first.into_iter().flatten().collect::<Vec<_>>());
            results.tensor(&seed);
        });
    }),
    job(
        "a host optimizer",
        &[
            "tamp_gradients_inspect",
            "tamp_gradients_unscale",
            "tamp_gradients_drop",
            "tamp_scales_update",
            "tamp_any_nonzero",
            "tamp_numbers_read",
            "tamp_number_set",
            "tamp_number_limit",
            "tamp_flags_join",
            "tamp_sizes",
        ],
        |device, within, results| {
            for tolerance in [0.0, 0.3] {
                let config = GradScalerConfig {
                    init_scale: 1024.0,
                    growth_interval: 2,
                    ..Default::default()
                };
                let config = GradScalerConfig { hysteresis: 2, tolerance, ..config };
                let mut scaler = config.build(device).unwrap();
                for bad in [false, false, true, true, false] {
                    let list = leaves(device, F32);
                    for w in list.iter().filter(|_| bad) {
                        let _filled = no_grad(|| w.grad().fill_(f64::INFINITY));
                    }
                    let mut opt = Descent(list);
                    within(&mut || {
                        scaler.unscale_(&mut opt).unwrap();
                        results.value(scaler.non_finite_gradients(&opt).unwrap());
                        results.value(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
                        scaler.update().unwrap();
                        results.value(scaler.get_scale().unwrap());
                        results.value(scaler.state_dict().unwrap());
                    });
                    results.tensors(&opt.0);
                }
                let list = leaves(device, F32);
                for gradient in gradients(&list) {
                    let _infinite = no_grad(|| gradient.view(-1).get(0).fill_(f64::INFINITY));
                }
                let mut opt = Descent(list);
                within(&mut || {
                    let mut scaler = GradScaler::skip_only(device).unwrap();
                    scaler.unscale_(&mut opt).unwrap();
                    results.value(scaler.non_finite_gradients(&opt).unwrap());
                });
                within(&mut || {
                    scaler.set_growth_interval(1).unwrap();
                    scaler.update_with_tensor(&Tensor::from(70000.5f32).to_device(device)).unwrap();
                    let state = scaler.state_dict().unwrap();
                    scaler.load_state_dict(&state).unwrap();
                    results.value(scaler.get_scale().unwrap());
                });
            }
        },
    ),
    job(
        "fused optimizers",
        &[
            "tamp_optim_step",
            "tamp_optim_states_new",
            "tamp_masters_new",
            "tamp_masters_renew",
            "tamp_master_join",
            "tamp_master_remainder_of",
            "tamp_gradients_widen",
            "tamp_gradients_norm",
            "tamp_norms_join",
            "tamp_clip_factor",
            "tamp_stamps_compare",
            "tamp_stamps_take",
            "tamp_arrival_new",
            "tamp_arrival_poll",
        ],
        |device, within, results| {
            for algorithm in algorithms() {
                for masters in MASTERS {
                    let kind = if masters == MasterWeights::None { F32 } else { Kind::BFloat16 };
                    let list = leaves(device, kind);
                    let mut opt = algorithm.master_weights(masters).build(&list, 0.1).unwrap();
                    let mut scaler = scaler(device, 1.0 / 1024.0);
                    for step in 0..3 {
                        within(&mut || {
                            match step {
                                0 => scaler.step(&mut opt).map(drop).unwrap(),
                                1 => scaler.step_clip_norm(&mut opt, 3.3).map(drop).unwrap(),
                                _ => scaler.step_clip_value(&mut opt, 0.7).map(drop).unwrap(),
                            }
                            scaler.update().unwrap();
                        });
                        if step == 1 {
                            // The masters have to be renewed.
                            let _written = no_grad(|| list[0].shallow_clone().fill_(0.3));
                        }
                    }
                    let saved = inside(within, || {
                        let state = opt.state_dict().unwrap();
                        opt.load_state_dict(&state).unwrap();
                        opt.step().unwrap();
                        opt.state_dict().unwrap()
                    });
                    results.tensors(&list);
                    for (name, entry) in &saved.state {
                        for (key, tensor) in entry {
                            results.value((name, key));
                            results.tensor(tensor);
                        }
                    }
                }
            }
        },
    ),
    job(
        "clipped gradients",
        &["tamp_clip_grad_norm", "tamp_clip_grad_value"],
        |device, within, results| {
            let finite = ClipNorm { error_if_nonfinite: true, ..3.3.into() };
            for kind in [F32, Kind::Double, Kind::BFloat16] {
                let mut list = leaves(device, kind);
                list.extend(leaves(Device::Cpu, F32));
                within(&mut || {
                    for norm_type in [2.0, 1.0, 2.7, f64::INFINITY] {
                        let clip = ClipNorm { norm_type, ..70000.3.into() };
                        results.tensor(&clip_grad_norm(&list, clip).unwrap());
                    }
                    results.tensor(&clip_grad_norm(&list, finite).unwrap());
                    clip_grad_value(&list, 0.7003).unwrap();
                });
                results.tensors(&gradients(&list));
                let _filled = no_grad(|| list[0].grad().fill_(f64::INFINITY));
                within(&mut || {
                    let error = clip_grad_norm(&list, finite);
                    results.value(error.map_err(|error| error.to_string()));
                });
            }
        },
    ),
    job("a transaction on several devices", &[], |device, within, results| {
        let mut list = leaves(device, F32);
        list.extend(leaves(Device::Cpu, F32));
        let mut opt = Descent(list);
        let mut scaler = scaler(device, 1024.0);
        within(&mut || {
            let mut unscaled = scaler.unscale(&mut opt).unwrap();
            for norm_type in [1.0, 2.0, 2.7, f64::INFINITY] {
                let clip = ClipNorm { norm_type, ..33.3.into() };
                results.tensor(&unscaled.clip_grad_norm(clip).unwrap());
            }
            unscaled.clip_grad_value(0.1003).unwrap();
            unscaled.step().unwrap();
            scaler.update().unwrap();
        });
        results.tensors(&opt.0);
        let mut opt = Sgd::default().build(leaves(device, F32), 0.1).unwrap();
        within(&mut || {
            let outcome = scaler.step_clip_norm(&mut opt, 3.3).unwrap();
            results.tensor(outcome.total_norm().unwrap());
            results.value(outcome.is_stepped().unwrap());
        });
    }),
    job(
        "scalers of several losses",
        &["tamp_gradients_take", "tamp_gradients_add"],
        |device, within, results| {
            let list =
                [2.7f32, 3.1].map(|x| Tensor::from(x).to_device(device).set_requires_grad(true));
            let mut opt = Sgd::default().build(&list, 0.1).unwrap();
            let mut scalers = PerLossScalers::new(device, 2).unwrap();
            let of_both = || sum_of(list.each_ref());
            for _ in 0..2 {
                let losses = [of_both(), of_both()];
                within(&mut || {
                    scalers.backward(0, &losses[0], &mut opt).unwrap();
                    scalers.backward(1, &losses[1], &mut opt).unwrap();
                    scalers.backward(1, &list[1], &mut opt).unwrap();
                    scalers.step_clip_norm(&mut opt, 3.3).unwrap();
                    scalers.update().unwrap();
                });
            }
            within(&mut || {
                results.value(scalers.overflowed().unwrap());
                results.value(scalers.state_dict().unwrap());
            });
            results.tensors(&list);
        },
    ),
    job("functional loss scales", &["tamp_all_finite"], |device, within, results| {
        let tree = vec![large(device, F32), large(device, Kind::Half), large(device, Kind::Double)];
        let bad = Tensor::from(f32::NAN).to_device(device);
        let mut dynamic = DynamicLossScale::new(device).unwrap();
        within(&mut || {
            let fixed = StaticLossScale::new(device, 1e5).unwrap();
            results.tensors(&fixed.scale(&tree).unwrap());
            results.tensors(&fixed.unscale(&tree).unwrap());
            results.value(fixed.value().unwrap());
            results.value(fixed.state_dict().unwrap());
            for numbers in [&tree[0], &bad, &tree[2]] {
                let finite = all_finite(numbers).unwrap();
                results.tensor(&finite);
                results.tensors(&select_tree(&finite, &tree, &tree).unwrap());
                dynamic.adjust(&finite).unwrap();
                results.value(dynamic.value().unwrap());
                results.value(dynamic.state_dict().unwrap());
            }
            results.tensor(dynamic.loss_scale().unwrap());
        });
    }),
    job("averages", &["tamp_average_count", "tamp_average_update"], |device, within, results| {
        for kind in [F32, Kind::BFloat16] {
            let vs = VarStore::new(device);
            let w = vs.root().var_copy("w", &large(device, F32));
            let mut mean = vs.root().sub("bn").zeros_no_train("running_mean", &[2]);
            let mut vs = vs;
            if kind != F32 {
                vs.bfloat16();
            }
            let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1).unwrap();
            let mut scaler = scaler(device, 1024.0);
            let mut ema = Ema { decay: 0.9, warmup: true, debias: true, ..Ema::default() }
                .build(&vs)
                .unwrap();
            let mut swa = inside(within, || Swa::default().build(&vs).unwrap());
            for _ in 0..3 {
                (&w * 100.0).sum(kind).backward();
                within(&mut || {
                    let outcome = scaler.step(&mut opt).unwrap();
                    scaler.update().unwrap();
                    ema.update(&outcome).unwrap();
                    swa.advance().unwrap();
                });
            }
            within(&mut || {
                results.value(ema.updates().unwrap());
                let batches = [1.003, 70.5];
                let forward = |number| {
                    let _filled = mean.fill_(number);
                    Ok(Tensor::new())
                };
                swa.update_batch_norm(0.1, batches, forward).unwrap();
                let swapped = ema.swap_in().unwrap();
                results.tensor(&w);
                drop(swapped);
                let swapped = swa.swap_in().unwrap();
                results.tensor(&mean);
                drop(swapped);
                ema.copy_to_model().unwrap();
            });
            results.tensor(&w);
            let mut checkpoint = Checkpoint::new();
            within(&mut || {
                checkpoint.add("ema", &mut ema).unwrap();
                checkpoint.restore().add("ema", &mut ema).apply().unwrap();
            });
            results.tensor(&ema.average("w").unwrap());
        }
    }),
    job("buffers", &[], |device, within, results| {
        let vs = VarStore::new(device);
        let mut mean = vs.root().zeros_no_train("mean", &[2, 3]);
        mean.copy_(&large(device, F32));
        within(&mut || {
            let mut snapshot = BufferSnapshot::new(&vs).unwrap();
            for changes in [true, false] {
                if changes {
                    snapshot.save().unwrap();
                }
                let _filled = mean.fill_(1.0);
                snapshot.restore().unwrap();
            }
            results.value(check_buffers_finite(&vs).is_ok());
        });
        assert_ne!(mean.double_value(&[0, 0]), 1.0, "it is a buffer");
        results.tensor(&mean);
    }),
    job("casts by a policy", &[], |device, within, results| {
        let policy = Policy { output: F32, ..Policy::BF16 };
        let mut vs = VarStore::new(device);
        let w = vs.root().var_copy("w", &large(device, F32));
        let tree = vec![large(device, F32), large(device, Kind::BFloat16)];
        within(&mut || {
            results.tensors(&Policy::FULL.cast_to_compute(&tree).unwrap());
            results.tensors(&policy.cast_to_compute(&tree).unwrap());
            results.tensors(&policy.cast_to_param(&tree).unwrap());
            results.tensors(&policy.cast_to_output(&tree).unwrap());
            results.value(policy.cast_variables(&mut vs, KeepF32::Norms).unwrap());
        });
        results.tensor(&w);
    }),
    job("weighed losses", &[], |device, within, results| {
        for kind in [F32, Kind::Half, Kind::Double] {
            let loss = Tensor::from(2.7).to_kind(kind).to_device(device).set_requires_grad(true);
            within(&mut || {
                let mut window = Accumulation::of_weights([1.0, 2.0, 4.0]).unwrap();
                let weighed = window.weigh(&loss).unwrap();
                results.tensor(&weighed);
                weighed.backward();
            });
            results.tensor(&loss.grad());
            let list = leaves(device, kind);
            let mut window = Accumulation::of_weights([1.0, 2.0, 4.0]).unwrap();
            for _ in 0..3 {
                let loss = loss_of([&list[0], &list[1]], &large(device, kind));
                inside(within, || window.weigh(&loss).unwrap()).backward();
            }
            results.tensors(&gradients(&list));
        }
    }),
    job("micro-batches that are left out", &[], |device, within, results| {
        let list = [2.7f32, 3.1].map(|x| Tensor::from(x).to_device(device).set_requires_grad(true));
        let opt = Sgd::default().build(&list, 0.1).unwrap();
        let mut scaler = scaler(device, 65536.0);
        let mut window = Accumulation::of_weights([1.0, 2.0, 4.0]).unwrap();
        for batch in 0..3 {
            let loss = sum_of(list.each_ref());
            // Its gradient is infinite.
            let scale = if batch == 1 { f64::from(f32::MAX) } else { 65536.0 };
            let loss = if batch == 1 { loss * 1e20 } else { loss };
            scaler.update_with(scale.min(2f64.powi(127))).unwrap();
            within(&mut || window.backward_or_drop(&mut scaler, &opt, &loss).unwrap());
        }
        within(&mut || results.value(window.dropped().unwrap()));
        results.tensors(&gradients(&list));
    }),
    job("spikes", &["tamp_spikes_judge", "tamp_spikes_flag"], |device, within, results| {
        let list = leaves(device, F32);
        let mut opt = Sgd::default().build(&list, 1e-6).unwrap();
        let mut scaler = scaler(device, 1024.0);
        let config = SpikeConfig { window: 4, warmup: 2, ..Default::default() };
        let mut spikes = config.build().unwrap();
        for factor in [1.0, 1.0003, 0.9991, 1.0004, 5000.0, 1.0] {
            let loss = large(device, F32).max() * factor;
            opt.zero_grad().unwrap();
            backward_of([&list[0], &list[1]], &(large(device, F32) * factor));
            within(&mut || {
                spikes.watch_loss(&loss);
                let outcome = scaler.step_unless_spike(&mut opt, 3.3, &mut spikes).unwrap();
                results.value(outcome.is_stepped().unwrap());
                scaler.update().unwrap();
                results.value(spikes.counts().unwrap());
            });
        }
        results.tensors(&list);
    }),
    job(
        "gradients in one memory",
        &["tamp_clip_by_norm", "tamp_gradients_separate", "tamp_gradients_separate_leaves"],
        |device, within, results| {
            let list = [(); 2].map(|()| large(device, F32).detach().set_requires_grad(true));
            let [a, b] = &list;
            let mut opt = Descent(list.iter().map(Tensor::shallow_clone).collect());
            let scaler = scaler(device, 1e-3);
            for factor in [1.1, 2.3] {
                let loss = loss_of([a, b], &Tensor::full([6], factor, (F32, device)));
                inside(within, || scaler.scale(&loss).unwrap()).backward();
            }
            within(&mut || {
                let mut unscaled = scaler.unscale(&mut opt).unwrap();
                results.tensor(&unscaled.clip_grad_norm(0.1).unwrap());
            });
            results.tensors(&gradients(&list));
        },
    ),
    job("optimizers with common parameters", &["tamp_gradient_rest"], |device, within, results| {
        let list = [(); 2].map(|()| large(device, F32).detach().set_requires_grad(true));
        let [a, b] = &list;
        let mut optimizers =
            [(); 2].map(|()| Descent(list.iter().map(Tensor::shallow_clone).collect()));
        let mut scaler = scaler(device, 8.0);
        for opt in &mut optimizers {
            for w in list.iter().filter(|w| w.grad().defined()) {
                let _zeroed = w.grad().zero_();
            }
            let loss = loss_of([a, b], &Tensor::full([6], 1.1, (F32, device)));
            inside(within, || scaler.scale(&loss).unwrap()).backward();
            within(&mut || drop(scaler.step(opt).unwrap()));
        }
        results.tensors(&list);
    }),
    job(
        "master weights that go on in f32",
        &["tamp_gradients_narrow", "tamp_master_numbers", "tamp_overlapping"],
        |device, within, results| {
            let half = large(device, Kind::BFloat16).detach() * 1e-3;
            let half = half.set_requires_grad(true);
            let wide = half.detach().to_kind(F32).set_requires_grad(true);
            let sgd = Sgd::default().master_weights(MasterWeights::Float);
            let mut opt = sgd.build(vec![half.shallow_clone()], 1e-3).unwrap();
            (&half * 1.1).sum(F32).backward();
            opt.step().unwrap();
            no_grad(|| wide.shallow_clone().copy_(&half));
            within(&mut || {
                let mut resumed = sgd.build(vec![wide.shallow_clone()], 1e-3).unwrap();
                resumed.load_state_dict(&opt.state_dict().unwrap()).unwrap();
                drop(Sgd::default().build(vec![half.shallow_clone()], 1e-3).unwrap());
            });
            results.tensors(&[wide, half]);
        },
    ),
    job(
        "low-bit moments",
        &["tamp_optim_step", "tamp_codes_decode", "tamp_codes_encode"],
        |device, within, results| {
            for (algorithm, states) in [
                (Algorithm::from(AdamW::default()), MomentDtype::EightBit),
                (AdamW::default().into(), MomentDtype::BFloat16),
                (Muon::default().into(), MomentDtype::BFloat16),
            ] {
                let start: Tensor = Tensor::arange(5000, (F32, device)) * 1e-3;
                let weights = start.sin().view([100, 50]).set_requires_grad(true);
                let build = |states| {
                    let builder = algorithm.master_weights(MasterWeights::None).moments(states);
                    builder.build(&[weights.shallow_clone()], 1e-2)
                };
                let mut opt = build(states).unwrap();
                let mut scaler = scaler(device, 512.0);
                for _ in 0..3 {
                    opt.zero_grad().unwrap();
                    scaler.backward(&weights.square().sum(F32)).unwrap();
                    within(&mut || {
                        scaler.step_clip_norm(&mut opt, 0.7).map(drop).unwrap();
                        scaler.update().unwrap();
                    });
                }
                let saved = inside(within, || {
                    let mut plain = build(MomentDtype::F32).unwrap();
                    plain.load_state_dict(&opt.state_dict().unwrap()).unwrap();
                    opt.load_state_dict(&plain.state_dict().unwrap()).unwrap();
                    results.value(opt.memory_usage().unwrap());
                    opt.state_dict().unwrap()
                });
                results.tensor(&weights);
                for (key, tensor) in &saved.state["0"] {
                    results.value(key);
                    results.tensor(tensor);
                }
            }
        },
    ),
    job(
        "checkpoints",
        &[
            "tamp_elements_read",
            "tamp_elements_write",
            "tamp_is_dense",
            "tamp_rng_check_state",
            "tamp_rng_state",
            "tamp_rng_set_state",
        ],
        |device, within, results| {
            let vs = VarStore::new(device);
            let w = vs.root().var_copy("w", &large(device, F32));
            let strided = large(device, F32).tr();
            let mut opt = AdamW::default().build(&vs, 0.1).unwrap();
            (&w * 3.0).sum(F32).backward();
            opt.step().unwrap();
            let mut scaler = scaler(device, 1e5);
            let path = std::env::temp_dir().join(format!("tch-amp-own-{}.pt", std::process::id()));
            within(&mut || {
                let mut checkpoint = Checkpoint::new();
                checkpoint.add("model", &vs).unwrap();
                checkpoint.add("optimizer", &mut opt).unwrap();
                checkpoint.add("scaler", &mut scaler).unwrap();
                checkpoint.add_tensor("tensor", &strided).unwrap();
                checkpoint.add("rng", Rng(device)).unwrap();
                checkpoint.save(&path).unwrap();
                let saved = Checkpoint::load(&path).unwrap();
                let restore = saved.restore().add("model", &vs).add("rng", Rng(device));
                restore.add("optimizer", &mut opt).add("scaler", &mut scaler).apply().unwrap();
                results.tensor(&saved.tensor("tensor").unwrap());
                results.tensor(&checkpoint.tensor("tensor").unwrap());
                results.value(scaler.get_scale().unwrap());
            });
            std::fs::remove_file(&path).unwrap();
            results.tensor(&w);
        },
    ),
    job(
        "saves in the background",
        &["tamp_arrival_again", "tamp_arrival_wait", "tamp_arrival_copy"],
        |device, within, results| {
            let temporary = Folder::new();
            let mut folder = CheckpointFolder::new(temporary.file("saves")).unwrap();
            for step in 1..3 {
                for kind in [F32, Kind::Double, Kind::BFloat16] {
                    let mut checkpoint = Checkpoint::new();
                    checkpoint.add_tensor("tensor", &large(device, kind).tr()).unwrap();
                    let pending = inside(within, || folder.save_async(step, &checkpoint).unwrap());
                    let saved = Checkpoint::load(pending.wait().unwrap()).unwrap();
                    results.tensor(&saved.tensor("tensor").unwrap());
                }
            }
        },
    ),
    job("halves", &[], |device, within, results| {
        let numbers = large(device, Kind::BFloat16).tr();
        within(&mut || {
            results.value(half::to_vec::<::half::bf16>(&numbers).unwrap());
            let back = half::from_slice(&[::half::bf16::from_f32(1e30)]).unwrap();
            results.tensor(&back);
        });
    }),
    job(
        "materialized gradients and cast inputs of custom functions",
        &[
            "tamp_function_begin",
            "tamp_function_record",
            "tamp_function_saved_tensors",
            "tamp_function_needs_input_grad",
        ],
        |device, within, results| {
            let x = large(device, F32).set_requires_grad(true);
            within(&mut || {
                let two = function(
                    |ctx, x| {
                        ctx.save_for_backward(x);
                        Ok([x[0].view_as(x[0]), x[0].view_as(x[0])])
                    },
                    |ctx, g| {
                        let [x] = ctx.saved_tensors()?;
                        assert_eq!((g[0].kind(), g[1].kind()), (F32, F32));
                        assert_eq!(g[1].size(), x.size());
                        Ok([Some(g[1].shallow_clone())])
                    },
                );
                let [first, _] = two.apply(&[&x]).unwrap();
                // The gradient of the second output is missing.
                let seed = first.as_strided([], [], Some(0));
                seed.backward();
            });
            results.tensor(&x.grad());
            let cast = inside(within, || {
                let double = function(|_, x| Ok(x[0] * 1.0), |_, g| Ok(&g[0] * 1.0));
                double.cast_inputs(Kind::Double).apply(&[&x]).unwrap()
            });
            // Outside of all regions nothing is cast.
            results.value(to_f64(&cast));
        },
    ),
    job("a module that is frozen", &["tamp_jit_freeze"], |device, within, results| {
        let file = traced(device);
        let frozen = inside(within, || jit::freeze(&file).unwrap());
        let module = CModule::load_data_on_device(&mut frozen.as_slice(), device).unwrap();
        results.tensor(&module.forward_ts(&[large(device, F32)]).unwrap());
    }),
    job("checks of derivatives", &[], |device, within, results| {
        let x = large(device, Kind::Double).set_requires_grad(true);
        within(&mut || {
            let f = |x: &[&Tensor]| Ok::<_, tch_amp::Error>([x[0].sin()]);
            let closer = tch_amp::gradcheck::GradCheck { eps: 1e-4, ..Default::default() };
            results.value(closer.gradcheck(f, &[&x]).is_ok());
            let transposed = |x: &[&Tensor]| Ok::<_, tch_amp::Error>([x[0].tr()]);
            results.value(gradcheck(transposed, &[&x]).is_ok());
            results.value(gradgradcheck(transposed, &[&x]).is_ok());
        });
    }),
];

/// The file of a module with a product of constants, which freezing computes.
fn traced(device: Device) -> Vec<u8> {
    let (weight, inputs) = (large(device, F32), [large(device, F32)]);
    let mut forward = |xs: &[Tensor]| vec![xs[0].matmul(&weight.tr().matmul(&weight))];
    let module = no_grad(|| CModule::create_by_tracing("Net", "forward", &inputs, &mut forward));
    let (_folder, file) = Folder::with("traced.pt");
    module.unwrap().save(&file).unwrap();
    std::fs::read(file).unwrap()
}

#[test]
fn obeys_no_region() {
    for_each_device(|device| assert_obeys_no_region(device, JOBS));
}
