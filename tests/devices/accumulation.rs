//! Micro-batches on a device.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::accumulation::Accumulation;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{Optimizer, Sgd};

use testkit::simulation::Simulation;
use testkit::to_f64;

/// A weight of three zeros in training, after an iteration that has made the scale.
fn begun() -> (VarStore, Tensor, Optimizer, GradScaler) {
    let vs = VarStore::new(Device::Cuda(0));
    let w = vs.root().zeros("w", &[3]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    let mut scaler = GradScaler::new(vs.device()).unwrap();
    scaler.backward(&(w.sum(Kind::Float) * 0.0)).unwrap();
    scaler.step(&mut opt).unwrap();
    scaler.update().unwrap();
    (vs, w, opt, scaler)
}

/// Gives a window micro-batches whose gradients are these factors.
fn take(
    window: &mut Accumulation,
    scaler: &mut GradScaler,
    opt: &Optimizer,
    w: &Tensor,
    factors: &[f64],
) {
    for factor in factors {
        window.backward_or_drop(scaler, opt, &(w * *factor).sum(Kind::Float)).unwrap();
    }
}

#[test]
fn a_micro_batch_is_left_out_without_synchronizing() {
    let Some(simulation) = Simulation::find() else { return };
    let bad = [f64::INFINITY, f64::NAN];
    let cases = [
        (vec![2.0, 4.0], 3.0, vec![]),
        (vec![2.0, bad[0], 4.0], 3.0, vec![1]),
        (vec![bad[1], 2.0, 4.0], 3.0, vec![0]),
        (vec![2.0, 4.0, bad[1]], 3.0, vec![2]),
        (vec![bad[0], bad[1]], 0.0, vec![0, 1]),
    ];
    let (_vs, w, mut opt, mut scaler) = begun();
    for (factors, change, dropped) in cases {
        let before = w.double_value(&[0]);
        let (window, counts) = simulation.count(|| {
            opt.zero_grad().unwrap();
            let mut window = Accumulation::of_equal(factors.len()).unwrap();
            take(&mut window, &mut scaler, &opt, &w, &factors);
            scaler.step(&mut opt).unwrap();
            scaler.update().unwrap();
            window
        });
        assert_eq!(counts.host_syncs, 0, "{factors:?}");
        assert_eq!(window.dropped().unwrap(), dropped);
        let moved = before - w.double_value(&[0]);
        assert!((moved - change).abs() < 1e-5, "{factors:?}: {moved}");
    }
}

/// What was left out before the checkpoint is known to the host, and what is left out after it is not.
#[test]
fn a_resumed_window_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let (vs, w, mut opt, mut scaler) = begun();
    let factors = [f64::NAN, 2.0, f64::INFINITY, 4.0];
    for place in 0..=factors.len() {
        let before = w.double_value(&[0]);
        opt.zero_grad().unwrap();
        let mut window = Accumulation::of_equal(factors.len()).unwrap();
        take(&mut window, &mut scaler, &opt, &w, &factors[..place]);
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("window", window.with_gradients(vs.variables())).unwrap();
        let mut resumed = Accumulation::of_equal(1).unwrap();
        let window = resumed.with_gradients(vs.variables());
        checkpoint.restore().add("window", window).apply().unwrap();
        let ((), counts) = simulation.count(|| {
            take(&mut resumed, &mut scaler, &opt, &w, &factors[place..]);
            scaler.step(&mut opt).unwrap();
            scaler.update().unwrap();
        });
        assert_eq!(counts.host_syncs, 0, "resumed at {place}");
        assert_eq!(resumed.dropped().unwrap(), [0, 2], "resumed at {place}");
        let moved = before - w.double_value(&[0]);
        assert!((moved - 3.0).abs() < 1e-5, "resumed at {place}: {moved}");
    }
}

/// The call that failed is made again, and the gradients are as if it had not failed.
#[test]
fn a_micro_batch_that_runs_out_of_memory_can_be_retried() {
    let Some(simulation) = Simulation::find() else { return };
    let run = |bad: usize, n: i64| {
        let w = Tensor::zeros([3], (Kind::Float, Device::Cuda(0))).set_requires_grad(true);
        let unused = Tensor::zeros([2], (Kind::Float, Device::Cuda(0))).set_requires_grad(true);
        let opt = Sgd::default().build(&[w.shallow_clone(), unused.shallow_clone()], 1.0).unwrap();
        let mut scaler = GradScaler::new(Device::Cuda(0)).unwrap();
        // The second parameter has a gradient of the first micro-batch only.
        let losses: Vec<_> = (0..3)
            .map(|i| {
                let factor = if i == bad { f64::NAN } else { 1.0 + i as f64 };
                let loss = (&w * factor).sum(Kind::Float);
                if i == 0 { loss + unused.sum(Kind::Float) * factor } else { loss }
            })
            .collect();
        let mut window = Accumulation::of_weights([1.0, 2.0, 1.0]).unwrap();
        simulation.fail_allocation(n);
        let mut graph_is_gone = false;
        for loss in &losses {
            if window.backward_or_drop(&mut scaler, &opt, loss).is_err() {
                assert_eq!(simulation.fail_allocation(0), 0);
                // autograd frees the graph as it goes.
                graph_is_gone = window.backward_or_drop(&mut scaler, &opt, loss).is_err();
                if graph_is_gone {
                    break;
                }
            }
        }
        let left = simulation.fail_allocation(0);
        let gradients = [&w, &unused].map(|w| w.grad().defined().then(|| to_f64(&w.grad())));
        (left, graph_is_gone, gradients, window.dropped().unwrap())
    };
    for bad in 0..4 {
        let (_, _, gradients, dropped) = run(bad, 0);
        assert_eq!(dropped.len(), usize::from(bad < 3));
        let mut retried = 0;
        for n in 1.. {
            let (left, graph_is_gone, got, also_dropped) = run(bad, n);
            if !graph_is_gone {
                assert_eq!((&got, &also_dropped), (&gradients, &dropped), "{bad}, allocation {n}");
                retried += i32::from(left == 0);
            }
            if left > 0 {
                break;
            }
        }
        assert!(
            retried > 3 || bad == 3,
            "{bad}: {retried} failures were outside of the backward pass"
        );
    }
}
