//! What the tools compute themselves obeys no region; see `testkit::own_arithmetic`.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::Autocast;
use tch_amp::insight::{ScaleHealth, ScaleHistory, Tracer, audit};
use tch_amp::optim::Sgd;
use tch_amp::scaler::{GradScalerConfig, SpikeConfig};

use crate::insight::alone;
use testkit::for_each_device;
use testkit::own_arithmetic::{Job, assert_obeys_no_region, backward_of, job, large};

const JOBS: &[Job] = &[
    job(
        "the health of a scale and its history",
        &["tamp_exponents_count", "tamp_history_record"],
        |device, within, results| {
            let vs = VarStore::new(device);
            let [v, w] = ["v", "w"]
                .map(|name| vs.root().sub("part").var_copy(name, &large(device, Kind::Float)));
            let config = GradScalerConfig { init_scale: 1e5, ..Default::default() };
            let mut scaler = config.build(device).unwrap();
            let mut opt = Sgd::default().build(&vs, 1e-3).unwrap();
            let mut health = ScaleHealth::new(&vs);
            let mut history = ScaleHistory::new(4).unwrap();
            let mut spikes = SpikeConfig::default().build().unwrap();
            let loss = large(device, Kind::Float).max();
            for _ in 0..3 {
                opt.zero_grad().unwrap();
                backward_of([&v, &w], &large(device, Kind::Float));
                within(&mut || {
                    health.observe(&scaler).unwrap();
                    spikes.watch_loss(&loss);
                    let outcome = scaler.step_unless_spike(&mut opt, 3.3, &mut spikes).unwrap();
                    history.set_loss(&loss).unwrap();
                    history.record(&scaler, &outcome, 1e-3).unwrap();
                    scaler.update().unwrap();
                });
            }
            within(&mut || {
                results.value(health.report().unwrap());
                results.value(history.report().unwrap());
            });
        },
    ),
    job(
        "the cause of an overflow, and an audit",
        &["tamp_recording_start", "tamp_recording_stop"],
        |device, within, results| {
            let vs = VarStore::new(device);
            let w = vs.root().sub("part").var_copy("w", &Tensor::from(1e30f32));
            let mean = vs.root().sub("part").zeros_no_train("mean", &[2]);
            let mut scaler =
                GradScalerConfig { init_scale: 1e10, ..Default::default() }.build(device).unwrap();
            let mut opt = Sgd::default().build(&vs, 1e-3).unwrap();
            let mut tracer = Tracer::new(&vs).unwrap();
            within(&mut || {
                tracer.begin(&scaler).unwrap();
                // It overflows in the scaling.
                let loss = || Ok(w.view([1]).select(0, 0));
                scaler.backward(&loss().unwrap()).unwrap();
                let _filled = no_grad(|| w.grad().fill_(f64::INFINITY));
                let outcome = scaler.step(&mut opt).unwrap();
                let explained = tracer.explain_if_skipped(&scaler, &outcome, loss).unwrap();
                results.value(explained.map(|explained| explained.cause));
                scaler.update().unwrap();
                let off = Autocast::new(device).enabled(false);
                let loss = |_: Autocast| Ok(w.view([1]).select(0, 0));
                let audit = audit(&vs, &off, &scaler, loss);
                results.value(audit.map(|audit| audit.losses).map_err(|error| error.to_string()));
            });
            results.tensor(&mean);
        },
    ),
];

#[test]
fn obeys_no_region() {
    let _alone = alone();
    for_each_device(|device: Device| assert_obeys_no_region(device, JOBS));
}
