//! Gradients in one memory, as libtorch's backward pass leaves them: that of a sum of two unsqueezed leaves gives both
//! leaves views of the same tensor.

use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::accumulation::Accumulation;
use tch_amp::gradients::{clip_grad_norm, clip_grad_value};
use tch_amp::optim::{Adagrad, AdamW, Algorithm, AmpOptimizer, Lion, MasterWeights, RmsProp, Sgd};
use tch_amp::recompute::checkpointed;
use tch_amp::scaler::{PerLossScalers, SpikeConfig};
use tch_amp::{GradScaler, function};

use crate::scaler::{Descent, drop_gradients, ones, rows, with_scale};
use testkit::tensors::leaf;
use testkit::{for_each_device, to_f64};

/// A loss whose backward pass gives both leaves gradients of `factor`, in the same memory.
fn loss([a, b]: &[Tensor; 2], factor: f64) -> Tensor {
    ((a.unsqueeze(0) + b.unsqueeze(0)) * factor).sum(None)
}

fn pair(device: Device) -> [Tensor; 2] {
    [(); 2].map(|()| ones(Kind::Float, device))
}

fn scaler(device: Device) -> GradScaler {
    with_scale(1024.0).build(device).unwrap()
}

/// Two leaves of ones on each device, with a scaler.
fn for_each_pair(test: impl Fn(&[Tensor; 2], &mut GradScaler)) {
    for_each_device(|device| test(&pair(device), &mut scaler(device)));
}

fn gradients(leaves: &[Tensor]) -> Vec<Vec<f64>> {
    leaves.iter().map(|leaf| to_f64(&leaf.grad())).collect()
}

fn values(leaves: &[Tensor]) -> Vec<Vec<f64>> {
    leaves.iter().map(to_f64).collect()
}

/// If this fails, libtorch separates the gradients itself, and the other tests of this file show nothing.
#[test]
fn libtorch_lets_two_leaves_share_a_gradient() {
    for_each_pair(|leaves, _| {
        loss(leaves, 3.0).backward();
        let _written = leaves[0].grad().fill_(7.0);
        assert_eq!(gradients(leaves), [[7.0; 3]; 2]);
    });
}

/// Parameters in f32 have no master weights, and so their gradients are not copied into another dtype.
#[test]
fn each_is_unscaled_once() {
    for_each_pair(|leaves, scaler| {
        let masters = Sgd::default().master_weights(MasterWeights::Float);
        let mut opts: [Box<dyn AmpOptimizer>; 2] =
            [Box::new(Descent::of(leaves)), Box::new(masters.build(leaves, 1.0).unwrap())];
        for opt in &mut opts {
            drop_gradients(leaves);
            scaler.backward(&loss(leaves, 3.0)).unwrap();
            scaler.unscale_(&mut **opt).unwrap();
            assert_eq!(gradients(leaves), [[3.0; 3]; 2]);
            scaler.update().unwrap();
        }
    });
}

#[test]
fn an_optimizer_of_tch_moves_each_by_its_gradient() {
    for_each_device(|device| {
        let vs = VarStore::new(device);
        let leaves = [vs.root().ones("a", &[3]), vs.root().ones("b", &[3])];
        let mut opt = nn::Sgd::default().build(&vs, 1.0).unwrap();
        let mut scaler = scaler(device);
        for step in 1..4 {
            opt.zero_grad();
            scaler.backward(&loss(&leaves, 3.0)).unwrap();
            assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
            scaler.update().unwrap();
            assert_eq!(values(&leaves), [[1.0 - 3.0 * f64::from(step); 3]; 2]);
        }
    });
}

/// On a GPU the kernels of libtorch unscale the gradients in place, one after the other.
#[test]
fn a_fused_optimizer_moves_both_as_it_moves_one() {
    let algorithms: [Algorithm; 5] = [
        Sgd::default().into(),
        AdamW::default().into(),
        Adagrad::default().into(),
        RmsProp::default().into(),
        Lion::default().into(),
    ];
    for_each_device(|device| {
        for algorithm in algorithms {
            for clips in [false, true] {
                let run = |shares: bool| {
                    let leaves = pair(device);
                    let mut opt = algorithm.build(&leaves, 0.1).unwrap();
                    let mut scaler = scaler(device);
                    for _ in 0..3 {
                        drop_gradients(&leaves);
                        let loss = match shares {
                            true => loss(&leaves, 3.0),
                            false => leaves.iter().map(|leaf| (leaf * 3.0).sum(None)).sum(),
                        };
                        scaler.backward(&loss).unwrap();
                        let _outcome = match clips {
                            true => scaler.step_clip_norm(&mut opt, 1.0).unwrap(),
                            false => scaler.step(&mut opt).unwrap(),
                        };
                        scaler.update().unwrap();
                    }
                    values(&leaves)
                };
                assert_eq!(run(true), run(false), "{algorithm:?}");
            }
        }
    });
}

#[test]
fn each_loss_of_several_is_unscaled_once() {
    for_each_device(|device| {
        let leaves = pair(device);
        let mut opt = Descent::of(&leaves);
        let mut scalers = PerLossScalers::new(device, 2).unwrap();
        scalers.backward(0, &loss(&leaves, 3.0), &mut opt).unwrap();
        scalers.backward(1, &loss(&leaves, 5.0), &mut opt).unwrap();
        assert_eq!(gradients(&leaves), [[8.0; 3]; 2]);
    });
}

#[test]
fn clipping_multiplies_each_once() {
    for_each_pair(|leaves, _| {
        loss(leaves, 3.0).backward();
        let norm = clip_grad_norm(leaves, 1.0).unwrap().double_value(&[]);
        assert!((norm - (6.0f64 * 9.0).sqrt()).abs() < 1e-5, "{norm}");
        let after: f64 = gradients(leaves).iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
        assert!((after - 1.0).abs() < 1e-5, "{after}");
        clip_grad_value(leaves, 0.25).unwrap();
        assert_eq!(gradients(leaves), [[0.25; 3]; 2]);
    });
}

#[test]
fn accumulated_gradients_are_sums() {
    for_each_device(|device| {
        for way in 0..4 {
            let leaves = pair(device);
            let mut opt = Descent::of(&leaves);
            let mut scaler = scaler(device);
            let mut window = Accumulation::of_equal(3).unwrap();
            for factor in [3.0, 6.0, 9.0] {
                let loss = loss(&leaves, factor);
                match way {
                    0 => scaler.backward(&(loss / 3.0)).unwrap(),
                    1 => window.backward(&mut scaler, &loss).unwrap(),
                    2 => window.backward_or_drop(&mut scaler, &opt, &loss).unwrap(),
                    _ => window.weigh(&(loss * 1024.0)).unwrap().backward(),
                }
            }
            scaler.unscale_(&mut opt).unwrap();
            assert_eq!(gradients(&leaves), [[6.0; 3]; 2], "way {way} on {device:?}");
        }
    });
}

/// A loss whose backward pass gives each of two leaves three of four numbers, of which two are those of both.
fn overlapping_loss(leaves: &[Tensor; 2]) -> Tensor {
    let sum = function(
        |_, x| Ok((x[0] + x[1]).sum(None)),
        |_, grads| {
            let whole = Tensor::ones([4], (Kind::Float, grads[0].device())) * &grads[0];
            Ok([0, 1].map(|start| Some(whole.narrow(0, start, 3))))
        },
    );
    sum.apply(&[&leaves[0], &leaves[1]]).unwrap()
}

/// Gradients with some numbers in common begin at different places.
#[test]
fn gradients_that_overlap_in_part_are_unscaled_and_clipped_once() {
    for_each_device(|device| {
        let leaves = pair(device);
        let mut scaler = scaler(device);
        scaler.backward(&overlapping_loss(&leaves)).unwrap();
        let _written = leaves[0].grad().fill_(2048.0);
        assert_eq!(gradients(&leaves), [[2048.0; 3], [2048.0, 2048.0, 1024.0]], "they overlap");
        scaler.unscale_(&mut Descent::of(&leaves)).unwrap();
        assert_eq!(gradients(&leaves), [[2.0; 3], [2.0, 2.0, 1.0]]);
        let leaves = pair(device);
        overlapping_loss(&leaves).backward();
        let _norm = clip_grad_norm(&leaves, 0.5).unwrap();
        let factor = 0.5 / (6f64.sqrt() + 1e-6);
        for number in gradients(&leaves).concat() {
            assert!((number - factor).abs() < 1e-6, "{number} {factor}");
        }
    });
}

/// The gradients of two optimizers, of which the first is unscaled before the second is looked at.
#[test]
fn optimizers_do_not_unscale_for_each_other() {
    for_each_pair(|leaves, scaler| {
        scaler.backward(&loss(leaves, 3.0)).unwrap();
        let [mut one, mut other] = [Descent::of([&leaves[0]]), Descent::of([&leaves[1]])];
        scaler.unscale_(&mut one).unwrap();
        assert_eq!(gradients(leaves), [[3.0; 3], [3072.0; 3]]);
        scaler.unscale_(&mut other).unwrap();
        assert_eq!(gradients(leaves), [[3.0; 3]; 2]);
    });
}

/// The gradients of the parts of a `cat` are views of one tensor that do not overlap, but have one version counter.
#[test]
fn a_later_loss_on_one_part_of_a_cat_does_not_change_the_other() {
    for_each_pair(|leaves, scaler| {
        scaler.backward(&(Tensor::cat(leaves, 0) * 3.0).sum(None)).unwrap();
        let mut one = Descent::of([&leaves[0]]);
        scaler.unscale_(&mut one).unwrap();
        scaler.backward(&(&leaves[1] * 5.0).sum(None)).unwrap();
        assert!(scaler.step(&mut one).unwrap().is_stepped().unwrap());
        assert!(scaler.step(&mut Descent::of([&leaves[1]])).unwrap().is_stepped().unwrap());
        assert_eq!(values(leaves), [[-2.0; 3], [-7.0; 3]]);
    });
}

/// Parts of one tensor that do not overlap are changed where they are.
#[test]
fn parts_of_one_tensor_are_not_copied() {
    for_each_pair(|leaves, scaler| {
        scaler.backward(&(Tensor::cat(leaves, 0) * 3.0).sum(None)).unwrap();
        let before: Vec<_> = leaves.iter().map(|leaf| leaf.grad().data_ptr()).collect();
        scaler.unscale_(&mut Descent::of(leaves)).unwrap();
        let after: Vec<_> = leaves.iter().map(|leaf| leaf.grad().data_ptr()).collect();
        assert_eq!((before, gradients(leaves)), (after, vec![vec![3.0; 3]; 2]));
    });
}

/// Two sparse gradients whose values are one tensor, as those of two embeddings are whose outputs are added.
#[test]
fn sparse_gradients_are_unscaled_once() {
    for_each_device(|device| {
        let table = || Tensor::ones([4, 2], (Kind::Float, device)).set_requires_grad(true);
        let tables = [table(), table()];
        let rows = tables.each_ref().map(|table| rows(table, &[1, 3]));
        let mut scaler = scaler(device);
        scaler.backward(&((&rows[0] + &rows[1]) * 3.0).sum(None)).unwrap();
        scaler.unscale_(&mut Descent::of(&tables)).unwrap();
        for table in &tables {
            assert!(table.grad().is_sparse());
            assert_eq!(to_f64(&table.grad().to_dense(None, false).sum(None)), [12.0]);
        }
    });
}

/// A product in whose backward pass the gradient of `a` is a view of `b`, as a function may return one.
fn product(leaves: &[Tensor; 2]) -> Tensor {
    let product = function(
        |ctx, x| {
            ctx.save_for_backward(x);
            Ok((x[0] * x[1]).sum(None))
        },
        |ctx, _| {
            let [a, b] = ctx.saved_tensors()?;
            Ok([Some(b.detach().view([3])), Some(a.detach() * 1024.0)])
        },
    );
    product.apply(&[&leaves[0], &leaves[1]]).unwrap()
}

#[test]
fn a_gradient_in_the_memory_of_a_weight_leaves_the_weight_alone() {
    for_each_pair(|leaves, scaler| {
        scaler.backward(&product(leaves)).unwrap();
        scaler.unscale_(&mut Descent::of(leaves)).unwrap();
        assert_eq!(values(leaves), [[1.0; 3]; 2]);
        assert_eq!(to_f64(&leaves[0].grad()), [1.0 / 1024.0; 3]);
    });
}

/// On a GPU the gradients of a micro-batch that is not finite are zeroed in place.
#[test]
fn a_micro_batch_that_is_left_out_leaves_the_weights_alone() {
    for_each_device(|device| {
        let leaves = pair(device);
        let other = ones(Kind::Float, device);
        let opt = Descent::of([&leaves[0], &leaves[1], &other]);
        let mut window = Accumulation::of_equal(2).unwrap();
        let mut scaler = scaler(device);
        let overflow = product(&leaves) + (&other * f64::INFINITY).sum(None);
        window.backward_or_drop(&mut scaler, &opt, &overflow).unwrap();
        assert_eq!(values(&leaves), [[1.0; 3]; 2]);
    });
}

/// What is kept of a window is weighed anew, with the gradients from before it.
#[test]
fn gradients_from_before_a_window_are_weighed_once() {
    for_each_device(|device| {
        let leaves = pair(device);
        let other = ones(Kind::Float, device);
        let opt = Descent::of([&leaves[0], &leaves[1], &other]);
        loss(&leaves, 3.0).backward();
        let mut window = Accumulation::of_equal(2).unwrap();
        let mut scaler = scaler(device);
        for factor in [1.0, f64::INFINITY] {
            window.backward_or_drop(&mut scaler, &opt, &(&other * factor).sum(None)).unwrap();
        }
        assert_eq!(gradients(&leaves), [[6.0; 3]; 2]);
    });
}

/// A step without a scale multiplies the gradients by the clip factor, on a GPU in place.
#[test]
fn a_step_that_looks_for_spikes_clips_each_once() {
    for_each_device(|device| {
        for way in 0..3 {
            let leaves = pair(device);
            let mut scaler = GradScaler::disabled();
            let mut spikes = SpikeConfig::default().build().unwrap();
            let mut opt = Sgd::default().build(&leaves, 1.0).unwrap();
            let loss = match way {
                0 => (&leaves[0] + &leaves[1] * 1024.0).sum(None),
                1 => product(&leaves),
                _ => loss(&leaves, 3.0),
            };
            let by = match way {
                2 => [3.0; 2],
                _ => [1.0, 1024.0],
            };
            loss.backward();
            let outcome = scaler.step_unless_spike(&mut opt, 1.0, &mut spikes).unwrap();
            assert!(outcome.is_stepped().unwrap());
            let norm = by.iter().map(|g: &f64| 3.0 * g * g).sum::<f64>().sqrt();
            for (leaf, by) in values(&leaves).iter().zip(by) {
                let expected = 1.0 - by / (norm + 1e-6);
                assert!(leaf.iter().all(|w| (w - expected).abs() < 1e-6), "{leaf:?} {expected}");
            }
        }
    });
}

/// The sum of `x` and three times the leaves, which is recomputed.
fn segment(leaves: &[Tensor; 2], x: &Tensor) -> Tensor {
    let [a, b] = leaves.each_ref().map(Tensor::shallow_clone);
    let sum = move |x: &[&Tensor]| Ok((a.unsqueeze(0) + b.unsqueeze(0)) * 3.0 + x[0].unsqueeze(0));
    checkpointed(&[x], sum).unwrap().squeeze()
}

/// A recomputed segment makes gradients to which the part before it adds.
#[test]
fn what_a_recomputed_segment_leaves_is_added_to_once() {
    for_each_pair(|leaves, _| {
        segment(leaves, &(&leaves[0] * 2.0)).sum(None).backward();
        assert_eq!(gradients(leaves), [[5.0; 3], [3.0; 3]]);
    });
}

/// The segments of a recomputed model add to the gradients of their weights during one backward pass.
#[test]
fn recomputed_segments_add_to_separate_gradients() {
    for_each_pair(|leaves, _| {
        let x = leaf(&[0.0; 3], Kind::Float, leaves[0].device());
        segment(leaves, &segment(leaves, &x)).sum(None).backward();
        assert_eq!(gradients(leaves), [[6.0; 3]; 2]);
    });
}
