//! What a step cannot process is refused before anything changes, however often it is tried.

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::Error;
use tch_amp::optim::{AdamW, AmpOptimizer as _, MasterWeights, Muon, OptimizerError, Sgd, Step};

use crate::optim::{algorithms, build, set_grad, step_with, to_f64};
use testkit::bits::bits;
use testkit::optimizers::all_bits;
use testkit::tensors::leaf;
use testkit::{assert_refused, assert_says, devices, for_each_device};

#[test]
fn an_expanded_parameter_is_refused_and_no_other_changes() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let plain = leaf(&[1.0, 2.0, 3.0], Kind::Float, device);
            let one = Tensor::ones([1], (Kind::Float, device));
            let expanded = one.expand([3], false).set_requires_grad(true);
            let list = vec![plain.shallow_clone(), expanded.shallow_clone()];
            let mut opt = build(algorithm, list, 0.1);
            (&plain + &expanded).sum(Kind::Float).backward();
            for _ in 0..3 {
                assert_says(opt.step(), "share memory");
                assert_eq!(to_f64(&plain), [1.0, 2.0, 3.0], "{algorithm:?} on {device:?}");
                assert_eq!(to_f64(&one), [1.0], "{algorithm:?} on {device:?}");
            }
            // The step counts are unchanged as well.
            let state = opt.state_dict().unwrap().state;
            let steps = state.values().filter_map(|tensors| tensors.get("step"));
            assert!(steps.into_iter().all(|step| to_f64(step) == [0.0]), "{algorithm:?}");
        }
    });
}

/// Tensors made in inference mode must not be changed outside of it, which shows only when the result is copied back.
#[test]
fn a_state_that_cannot_be_written_is_refused_before_any_update() {
    let plain = leaf(&[1.0, 2.0], Kind::Float, Device::Cpu);
    let gapped = leaf(&[1.0, 2.0, 3.0, 4.0], Kind::Float, Device::Cpu).detach();
    let gapped = gapped.view([2, 2]).slice(1, 0, 1, 1).set_requires_grad(true);
    let list = vec![plain.shallow_clone(), gapped.shallow_clone()];
    let mut opt = AdamW::default().build(list, 0.1).unwrap();
    let backward = || (plain.sum(Kind::Float) + gapped.sum(Kind::Float)).backward();
    backward();
    opt.step().unwrap();
    let mut moment = opt.state_dict().unwrap().state["1"]["exp_avg"].shallow_clone();
    let shared = Tensor::zeros([1, 1], (Kind::Float, Device::Cpu)).expand([2, 1], false);
    no_grad(|| moment.set_data(&shared));
    let before = all_bits(&mut opt);
    for _ in 0..2 {
        assert_says(opt.step(), "share memory");
        assert_eq!(all_bits(&mut opt), before);
    }
    no_grad(|| moment.set_data(&Tensor::zeros([2, 1], (Kind::Float, Device::Cpu))));
    opt.step().unwrap();
}

/// The tensors of a state belong to the optimizer, but callers can replace their memory.
#[test]
fn a_state_without_its_memory_is_an_error() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let w = leaf(&[1.0, 2.0, 3.0], Kind::Float, device);
            let mut opt = build(algorithm, vec![w.shallow_clone()], 0.1);
            step_with(&mut opt, &w, &[1.0, 1.0, 1.0]);
            let state = opt.state_dict().unwrap().state;
            let Some(tensors) = state.get("0") else { continue };
            for (key, tensor) in tensors {
                let size = tensor.size();
                let kept = tensor.copy();
                let empty = Tensor::empty([0], (Kind::Float, device));
                let mut wrong = vec![
                    empty,
                    Tensor::zeros([7], (Kind::Float, device)),
                    Tensor::zeros(&size[..], (Kind::Double, device)),
                ];
                if device == Device::Cpu {
                    let options = (Kind::Float, device);
                    wrong.push(Tensor::internal_efficientzerotensor(&size[..], options));
                }
                for wrong in wrong {
                    let before = to_f64(&w);
                    no_grad(|| tensor.shallow_clone().set_data(&wrong));
                    let error = opt.step().unwrap_err().to_string();
                    assert_eq!(to_f64(&w), before, "{algorithm:?} {key} {wrong:?}: {error}");
                }
                no_grad(|| tensor.shallow_clone().set_data(&kept));
                opt.step().unwrap();
            }
            // Without any memory.
            for tensor in tensors.values() {
                let _emptied = no_grad(|| tensor.shallow_clone().set_());
            }
            assert!(opt.step().is_err(), "{algorithm:?}");
        }
    });
}

#[test]
fn stepping_a_copy_on_write_parameter_leaves_its_original_unchanged() {
    for algorithm in algorithms() {
        let original = leaf(&[1.0, 2.0, 3.0], Kind::Float, Device::Cpu).detach();
        let twin = original.copy().set_requires_grad(true);
        let w = original.internal_lazy_clone().detach().set_requires_grad(true);
        let mut opt = build(algorithm, vec![w.shallow_clone()], 0.1);
        let mut twins = build(algorithm, vec![twin.shallow_clone()], 0.1);
        for _ in 0..2 {
            set_grad(&w, &[1.0, -1.0, 0.5]);
            set_grad(&twin, &[1.0, -1.0, 0.5]);
            // A gradient may share its memory until the first write, too.
            let lazy = w.grad().internal_lazy_clone();
            no_grad(|| w.grad().set_data(&lazy));
            opt.step().unwrap();
            twins.step().unwrap();
        }
        assert_eq!(to_f64(&original), [1.0, 2.0, 3.0], "{algorithm:?}");
        assert_eq!(bits(&w), bits(&twin), "{algorithm:?}");
    }
}

/// They have one memory only until the first write, unlike two views of one copy.
#[test]
fn copy_on_write_parameters_of_one_original_are_stepped_apart() {
    for_each_device(|device| {
        let original = leaf(&[1.0, 2.0, 3.0], Kind::Float, device).detach();
        // Only memory that has several owners is compared.
        let copies = [(); 2].map(|()| original.internal_lazy_clone());
        let parameters = copies.each_ref().map(|copy| copy.detach().set_requires_grad(true));
        let mut opt = Sgd::default().build(&parameters, 1.0).unwrap();
        set_grad(&parameters[0], &[1.0; 3]);
        set_grad(&parameters[1], &[2.0; 3]);
        opt.step().unwrap();
        assert_eq!(parameters.each_ref().map(to_f64), [[0.0, 1.0, 2.0], [-1.0, 0.0, 1.0]]);
        assert_eq!(to_f64(&original), [1.0, 2.0, 3.0]);
        let copy = original.internal_lazy_clone();
        let views = [(); 2].map(|()| copy.detach().set_requires_grad(true));
        let refused = Sgd::default().build(&views, 1.0);
        assert_refused!(refused, Error::Optimizer(OptimizerError::SharedMemory { .. }));
    });
}

/// Memory in another order than the gradient's, or with gaps, is processed in a copy that has to be copied back.
#[test]
fn memory_in_any_order_gives_the_same_numbers() {
    for masters in [MasterWeights::None, MasterWeights::Float, MasterWeights::Remainder] {
        for layout in 0..3 {
            let numbers = Tensor::arange(64 * 48, (Kind::Float, Device::Cpu)).sin().view([64, 48]);
            let dense = numbers.to_kind(Kind::BFloat16).set_requires_grad(true);
            let other = match layout {
                0 => numbers.tr().contiguous().to_kind(Kind::BFloat16).tr(),
                1 => Tensor::zeros([64, 64], (Kind::BFloat16, Device::Cpu)).narrow(1, 8, 48),
                _ => Tensor::zeros([128, 48], (Kind::BFloat16, Device::Cpu)).slice(0, 1, 128, 2),
            };
            no_grad(|| other.shallow_clone().copy_(&dense));
            let other = other.detach().set_requires_grad(true);
            let made = |w: &Tensor| {
                let second = leaf(&[1.0, 2.0], Kind::BFloat16, Device::Cpu);
                let list = vec![w.shallow_clone(), second.shallow_clone()];
                let adamw = AdamW { amsgrad: true, ..Default::default() };
                (adamw.master_weights(masters).build(list, 1e-2).unwrap(), second)
            };
            let (mut one, first) = made(&dense);
            let (mut two, second) = made(&other);
            for step in 0..3 {
                for (w, second, opt) in [(&dense, &first, &mut one), (&other, &second, &mut two)] {
                    opt.zero_grad().unwrap();
                    let factors = (&numbers + step as f64).cos().to_kind(Kind::BFloat16);
                    let loss = (w * factors).sum(Kind::BFloat16) + second.sum(Kind::BFloat16);
                    loss.backward();
                    opt.step().unwrap();
                }
            }
            let message = format!("{masters:?}, layout {layout}");
            assert_eq!(bits(&dense), bits(&other.contiguous()), "{message}");
            assert_eq!(bits(&first), bits(&second), "{message}");
            let (one, two) = (one.state_dict().unwrap().state, two.state_dict().unwrap().state);
            for (name, tensors) in &one {
                for (key, tensor) in tensors {
                    let others = two[name][key].contiguous();
                    assert_eq!(bits(tensor), bits(&others), "{message}: {name} {key}");
                }
            }
        }
    }
}

#[test]
fn parameters_in_one_memory_are_refused_by_name() {
    for_each_device(|device| {
        let whole = Tensor::ones([4, 2], (Kind::Float, device));
        let part = |dim: i64, start: i64, len: i64| whole.narrow(dim, start, len);
        let parts = [part(0, 0, 2), part(0, 2, 2), part(1, 0, 1), part(1, 1, 1), part(0, 0, 4)];
        let all = parts.map(|part| part.detach().set_requires_grad(true));
        // The halves of the rows have nothing in common, nor have the two columns.
        let apart = |one: usize, other: usize| matches!((one, other), (0, 1) | (2, 3));
        for one in 0..5 {
            for other in one + 1..5 {
                let named = |i: usize| (format!("p{i}"), all[i].shallow_clone());
                let list = vec![named(one), named(other)];
                match (apart(one, other), AdamW::default().build(list, 0.1)) {
                    (true, built) => drop(built.unwrap()),
                    (false, built) => {
                        let error = built.unwrap_err().to_string();
                        let names = [one, other].map(|i| error.contains(&format!("p{i}")));
                        assert!(names == [true; 2] && error.contains("share memory"), "{error}");
                    }
                }
            }
        }
        let mut opt = AdamW::default().build(&[all[0].shallow_clone()], 0.1).unwrap();
        assert_says(opt.add_param_group(vec![("more", all[2].shallow_clone())]), "share memory");
        assert_eq!(opt.trainable_variables().len(), 1);
        assert_eq!(opt.state_dict().unwrap().param_groups.len(), 1);
    });
}

#[test]
fn parameters_that_come_to_share_memory_are_refused_before_any_update() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let [a, b] = [(); 2]
                .map(|()| Tensor::ones([2, 2], (Kind::Float, device)).set_requires_grad(true));
            let list = vec![("a", a.shallow_clone()), ("b", b.shallow_clone())];
            let mut opt = build(algorithm, list, 0.1);
            (&a + &b).sum(None).backward();
            opt.step().unwrap();
            let before = all_bits(&mut opt);
            let apart = b.detach().copy();
            no_grad(|| b.shallow_clone().set_data(&a.detach()));
            assert_says(opt.step(), "parameters a and b share memory");
            no_grad(|| b.shallow_clone().set_data(&apart));
            assert_eq!(all_bits(&mut opt), before, "{algorithm:?} on {device:?}");
            opt.step().unwrap();
        }
    });
}

/// Matrices and vectors in one dtype or in several, on the devices in turn.
fn parameters(kinds: &[Kind], devices: &[Device]) -> Vec<Tensor> {
    let places = kinds.iter().cycle().zip(devices.iter().cycle());
    let sizes: [&[i64]; 4] = [&[2, 3], &[3], &[3, 2], &[4]];
    let made = sizes.iter().zip(places).map(|(size, (kind, device))| {
        Tensor::ones(*size, (*kind, *device)).set_requires_grad(true)
    });
    made.collect()
}

/// Each argument that a scaler may pass, in forms that some kernels take and others do not.
#[test]
fn an_argument_that_no_step_can_use_changes_nothing() {
    let on = |device, kind| Tensor::ones([1], (kind, device));
    let wrong = |device| {
        vec![
            on(device, Kind::Double),
            on(device, Kind::Half),
            on(device, Kind::Int64),
            on(device, Kind::Bool),
            Tensor::ones([2], (Kind::Float, device)),
            Tensor::ones([0], (Kind::Float, device)),
            on(device, Kind::Float).to_sparse(None, None::<&[i64]>, None),
            Tensor::new(),
        ]
    };
    let mut runs: Vec<_> = devices().into_iter().map(|device| vec![device]).collect();
    runs.push(devices());
    let algorithms =
        algorithms().into_iter().chain([Muon { use_muon: false, ..Default::default() }.into()]);
    for algorithm in algorithms {
        for (kinds, masters) in [
            (&[Kind::Float, Kind::Double][..], MasterWeights::None),
            (&[Kind::BFloat16, Kind::Float], MasterWeights::Float),
        ] {
            for devices in &runs {
                let list = parameters(kinds, devices);
                let mut opt = algorithm.master_weights(masters).build(&list, 0.1).unwrap();
                let backward = || {
                    list.iter().for_each(|w| (w * 0.5).sum(w.kind()).backward());
                };
                backward();
                opt.step().unwrap();
                let before = all_bits(&mut opt);
                let device = devices[0];
                for (index, wrong) in wrong(device).iter().enumerate() {
                    let is_floating = index < 2;
                    for what in ["grad_scale", "the clip factor", "found_inf"] {
                        let good = on(device, Kind::Float);
                        let step = Step::default().with_grad_scale(&good).with_clip_factor(&good);
                        let step = match what {
                            "grad_scale" => step.with_grad_scale(wrong),
                            // The norm may be f64.
                            "the clip factor" if is_floating => continue,
                            "the clip factor" => step.with_clip_factor(wrong),
                            _ => step.with_found_inf(wrong),
                        };
                        let context = format!("{algorithm:?} {kinds:?} {devices:?} {what} {index}");
                        let error = opt.update(&step).map_err(|error| error.to_string());
                        assert!(error.is_err_and(|error| error.contains(what)), "{context}");
                        assert_eq!(all_bits(&mut opt), before, "{context}");
                    }
                }
                let good = on(device, Kind::Float);
                opt.update(&Step::default().with_grad_scale(&good)).unwrap();
                assert_ne!(all_bits(&mut opt), before, "{algorithm:?}");
            }
        }
    }
}
