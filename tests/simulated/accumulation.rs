//! Micro-batches on a device.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::accumulation::Accumulation;
use tch_amp::optim::Sgd;

use crate::common::simulation::Simulation;

#[test]
fn a_micro_batch_is_left_out_without_synchronizing() {
    let Some(simulation) = Simulation::find() else { return };
    let device = Device::Cuda(0);
    let bad = [f64::INFINITY, f64::NAN];
    let cases = [
        (vec![2.0, 4.0], 3.0, vec![]),
        (vec![2.0, bad[0], 4.0], 3.0, vec![1]),
        (vec![bad[1], 2.0, 4.0], 3.0, vec![0]),
        (vec![2.0, 4.0, bad[1]], 3.0, vec![2]),
        (vec![bad[0], bad[1]], 0.0, vec![0, 1]),
    ];
    let w = Tensor::zeros([3], (Kind::Float, device)).set_requires_grad(true);
    let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let mut scaler = GradScaler::new(device).unwrap();
    // The first iteration makes the scale.
    let loss = w.sum(Kind::Float) * 0.0;
    scaler.backward(&loss).unwrap();
    let _outcome = scaler.step(&mut opt).unwrap();
    scaler.update().unwrap();
    for (factors, change, dropped) in cases {
        let before = w.double_value(&[0]);
        let (window, counts) = simulation.count(|| {
            opt.zero_grad().unwrap();
            let mut window = Accumulation::of_equal(factors.len()).unwrap();
            for factor in &factors {
                let loss = (&w * *factor).sum(Kind::Float);
                window.backward_or_drop(&mut scaler, &opt, &loss).unwrap();
            }
            let _outcome = scaler.step(&mut opt).unwrap();
            scaler.update().unwrap();
            window
        });
        assert_eq!(counts.host_syncs, 0, "{factors:?}");
        assert_eq!(window.dropped().unwrap(), dropped);
        let moved = before - w.double_value(&[0]);
        assert!((moved - change).abs() < 1e-5, "{factors:?}: {moved}");
    }
}
