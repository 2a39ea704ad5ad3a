//! Data-parallel training, beside Python's `DistributedDataParallel`, bit by bit.

use serde_json::{Value, json};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{DdpConfig, ProcessGroup};
use tch_amp::optim::Sgd;
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler};

use super::{numbers, ranks};
use testkit::bits::hex;
use testkit::python::Oracle;

const WIDTH: i64 = 24;
const ROWS: i64 = 6;
const SCALE: f64 = 1024.0;
const GROWTH_INTERVAL: i64 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Config {
    bucket_cap_mb: Option<f64>,
    bucket_view: bool,
    unused: bool,
    compression: Option<Kind>,
    no_sync: bool,
    autocast: bool,
    scaled: bool,
    zero: bool,
}

impl Config {
    fn all() -> Vec<Self> {
        let plain = Self::default();
        let everything = Self {
            bucket_cap_mb: Some(0.001),
            bucket_view: true,
            compression: Some(Kind::BFloat16),
            no_sync: true,
            autocast: true,
            scaled: true,
            ..plain
        };
        vec![
            plain,
            Self { bucket_cap_mb: Some(0.001), ..plain },
            Self { bucket_view: true, ..plain },
            Self { unused: true, ..plain },
            Self { unused: true, scaled: true, bucket_cap_mb: Some(0.001), ..plain },
            Self { compression: Some(Kind::Half), ..plain },
            Self { compression: Some(Kind::BFloat16), bucket_cap_mb: Some(0.001), ..plain },
            Self { no_sync: true, ..plain },
            Self { autocast: true, ..plain },
            Self { scaled: true, ..plain },
            Self { scaled: true, compression: Some(Kind::Half), no_sync: true, ..plain },
            everything,
            Self { unused: true, ..everything },
            Self { zero: true, ..plain },
            Self { zero: true, ..everything },
        ]
    }

    fn json(&self) -> Value {
        let compression = self.compression.map(|kind| match kind {
            Kind::Half => "fp16",
            _ => "bf16",
        });
        json!({
            "bucket_cap_mb": self.bucket_cap_mb, "bucket_view": self.bucket_view, "unused": self.unused,
            "compression": compression, "no_sync": self.no_sync, "autocast": self.autocast, "scaled": self.scaled,
            "zero": self.zero,
        })
    }
}

struct Net {
    vs: VarStore,
    parameters: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

impl Net {
    fn new(seed: i64) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let shapes: [(&str, &[i64]); 5] = [
            ("w1", &[WIDTH, WIDTH]),
            ("b1", &[WIDTH]),
            ("bn", &[WIDTH]),
            ("extra", &[WIDTH]),
            ("w2", &[5, WIDTH]),
        ];
        let parameter = |(i, (name, shape)): (usize, &(&str, &[i64]))| {
            vs.root().var_copy(name, &numbers(shape, seed + i as i64))
        };
        let parameters = shapes.iter().enumerate().map(parameter).collect();
        let buffers = vec![
            vs.root().zeros_no_train("mean", &[WIDTH]),
            vs.root().ones_no_train("var", &[WIDTH]),
        ];
        Self { vs, parameters, buffers }
    }

    fn forward(&self, xs: &Tensor, with_extra: bool) -> Tensor {
        let [w1, b1, bn, extra, w2] = &self.parameters[..] else { unreachable!() };
        let xs = xs.linear(w1, Some(b1));
        let xs = if with_extra { xs + extra } else { xs };
        let (mean, var) = (Some(&self.buffers[0]), Some(&self.buffers[1]));
        let xs = xs.batch_norm(Some(bn), None::<&Tensor>, mean, var, true, 0.1, 1e-5, true);
        xs.relu().linear(w2, None::<&Tensor>)
    }
}

fn train(group: &ProcessGroup, config: Config) -> (f64, Vec<String>) {
    let rank = group.rank() as i64;
    let net = Net::new(7 + rank);
    let mut ddp = DdpConfig {
        bucket_cap_mb: config.bucket_cap_mb,
        find_unused_parameters: config.unused,
        gradient_as_bucket_view: config.bucket_view,
        compression: config.compression,
        ..Default::default()
    }
    .build(group, &net.vs)
    .unwrap();
    let mut scaler: GradScaler = GradScalerConfig {
        init_scale: SCALE,
        growth_interval: GROWTH_INTERVAL,
        enabled: config.scaled,
        ..Default::default()
    }
    .build(Device::Cpu)
    .unwrap();
    let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&net.vs, 0.0625).unwrap();
    if config.zero {
        opt.shard_over(group).unwrap();
    }
    for step in 0..20 {
        opt.zero_grad().unwrap();
        let count = if config.no_sync { 3 } else { 1 };
        for micro in 0..count {
            let seed = 1000 * step + 10 * micro + rank;
            let with_extra = !config.unused || (step + rank) % 3 == 0;
            let mut backward = |ddp: &mut tch_amp::distributed::DistributedDataParallel| {
                let region =
                    Autocast::new(Device::Cpu).dtype(Kind::BFloat16).enabled(config.autocast);
                let xs = numbers(&[ROWS, WIDTH], seed);
                let out = ddp.forward(|| region.run(|| net.forward(&xs, with_extra))).unwrap();
                let out = out.unwrap().to_kind(Kind::Float);
                let loss = (out - numbers(&[ROWS, 5], seed + 1)).square().mean(Kind::Float);
                let overflows = config.scaled && step % 5 == 1 && rank == 1;
                let loss = if overflows { loss * f64::INFINITY } else { loss };
                ddp.backward_scaled(&mut scaler, &loss).unwrap();
            };
            if micro + 1 < count { ddp.no_sync(backward) } else { backward(&mut ddp) }
        }
        drop(scaler.step(&mut opt).unwrap());
        scaler.update().unwrap();
    }
    let tensors = net.parameters.iter().chain(&net.buffers);
    (scaler.get_scale().unwrap(), tensors.map(hex).collect())
}

#[test]
fn training_has_the_bits_of_pytorch_on_every_rank() {
    let Some(oracle) = Oracle::find("distributed.py") else { return };
    tch::set_num_threads(1);
    for size in [2, 4] {
        let configs = Config::all();
        let list: Vec<_> = configs.iter().map(Config::json).collect();
        let output = oracle.run(&[], &json!([size, list]).to_string());
        let lines: Vec<_> = output.lines().collect();
        assert_eq!(lines.len(), configs.len());
        for (config, line) in configs.into_iter().zip(lines) {
            let theirs: Vec<(f64, Vec<String>)> = serde_json::from_str(line).unwrap();
            let ours = ranks(size, |group| train(&group, config));
            for (rank, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                assert_eq!(ours, theirs, "rank {rank} of {size}, {config:?}");
            }
            // The parameters are the same on all ranks, and have been trained.
            let parameters = |rank: usize| &ours[rank].1[..5];
            assert!((1..size).all(|rank| parameters(rank) == parameters(0)));
            assert_ne!(ours[0].1[0], hex(&Net::new(7).parameters[0]));
            assert_eq!(config.scaled, ours[0].0 != 1.0 && ours[0].0 != SCALE, "{}", ours[0].0);
        }
    }
}

#[test]
fn python_differs_as_documented() {
    if let Some(oracle) = Oracle::find("distributed_deviations.py") {
        assert_eq!(oracle.run(&[], "").trim(), "ok");
    }
}
