//! What groups compute themselves obeys no region; see `testkit::own_arithmetic`.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::distributed::{
    DdpConfig, Mean, ReduceOp, SamplerConfig, SyncBatchNorm, data_parallel,
};
use tch_amp::optim::AdamW;
use tch_amp::{Autocast, GradScaler};

use crate::distributed::ranks;
use testkit::own_arithmetic::{Job, Results, assert_obeys_no_region, job, large, leaves, sum_of};

const CPU: Device = Device::Cpu;
const F32: Kind = Kind::Float;

const JOBS: &[Job] = &[
    job(
        "collectives, means and samplers",
        &["tamp_random_permutation", "tamp_random_seed"],
        |_, within, results| {
            let found = ranks(2, |group| {
                let mut results = Results::default();
                within(&mut || {
                    let mut mean = Mean::default();
                    mean.add(&Tensor::from(70000.3f32), 3).unwrap();
                    mean.add(&Tensor::from(0.1f32), 5).unwrap();
                    mean.add_values(&large(CPU, F32)).unwrap();
                    results.value(mean.reduce(&group).unwrap());
                    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max] {
                        let mut numbers = large(CPU, F32).tr();
                        group.all_reduce(&mut numbers, op).unwrap();
                        results.tensor(&numbers);
                    }
                    results.tensors(&group.all_gather(&large(CPU, F32).tr()).unwrap());
                    results.tensor(&group.reduce_scatter(&large(CPU, F32)).unwrap());
                    let sampler = SamplerConfig::default().build(&group, 4099).unwrap();
                    results.tensor(&sampler.indices().unwrap());
                    let mut checkpoint = Checkpoint::new();
                    checkpoint.add_rngs("rngs", &group, CPU).unwrap();
                    checkpoint.restore().rngs("rngs", &group, CPU).apply().unwrap();
                });
                results
            });
            results.all(found);
        },
    ),
    job("batch normalization over ranks", &["tamp_statistics_momentum"], |_, within, results| {
        let found = ranks(2, |group| {
            let mut results = Results::default();
            let vs = VarStore::new(CPU);
            let layer = SyncBatchNorm::new(vs.root(), 3, Default::default(), &group);
            // It begins with a random one.
            let weight = layer.bn.ws.as_ref().map(Tensor::shallow_clone);
            let _filled = no_grad(|| weight.unwrap().fill_(1.3));
            let xs = large(CPU, F32).set_requires_grad(true);
            within(&mut || {
                let ys = layer.f_forward_t(&xs, true).unwrap();
                results.tensor(&ys);
                ys.as_strided([], [], Some(4)).backward();
                results.tensor(&layer.f_forward_t(&xs, false).unwrap());
            });
            results.tensor(&xs.grad());
            results.tensor(&layer.bn.running_mean);
            results.tensor(&layer.bn.running_var);
            results
        });
        results.all(found);
    }),
    job(
        "averaged gradients",
        &[
            "tamp_reducer_new",
            "tamp_reducer_parameters",
            "tamp_reducer_may_rebuild",
            "tamp_reducer_before_forward",
            "tamp_reducer_can_undo",
            "tamp_reducer_before_backward",
            "tamp_reducer_after_backward",
            "tamp_reducer_repeated",
        ],
        |_, within, results| {
            for compression in [None, Some(Kind::Half), Some(Kind::BFloat16)] {
                let found = ranks(2, |group| {
                    let mut results = Results::default();
                    let vs = VarStore::new(CPU);
                    let [v, w] = ["v", "w"]
                        .map(|name| vs.root().var_copy(name, &Tensor::from_slice(&[2.7f32])));
                    let options = DdpConfig { compression, ..Default::default() };
                    let mut ddp = options.build(&group, &vs).unwrap();
                    let mut opt = AdamW::default().build(&vs, 0.1).unwrap();
                    let mut scaler = GradScaler::new(CPU).unwrap();
                    scaler.update_with(1024.3).unwrap();
                    let off = Autocast::new(CPU).enabled(false);
                    let loss = || sum_of([&v, &w]);
                    for _ in 0..2 {
                        within(&mut || {
                            let loss = ddp.forward(|| off.run(loss).unwrap()).unwrap();
                            ddp.backward_scaled(&mut scaler, &loss).unwrap();
                            results.tensors(&[v.grad(), w.grad()]);
                            scaler.step(&mut opt).unwrap();
                            scaler.update().unwrap();
                            opt.zero_grad().unwrap();
                        });
                    }
                    results.tensors(&[v, w]);
                    results
                });
                results.all(found);
            }
        },
    ),
    job("sharded optimizers", &[], |_, within, results| {
        let found = ranks(2, |group| {
            let mut results = Results::default();
            let mut list = leaves(CPU, F32);
            list.push(large(CPU, F32).tr().detach().set_requires_grad(true));
            (&list[2] * 3.3).sum(F32).backward();
            let mut opt = AdamW::default().build(&list, 0.1).unwrap();
            opt.shard_over(&group).unwrap();
            within(&mut || {
                opt.step().unwrap();
                let state = opt.state_dict().unwrap();
                for tensors in state.state.values() {
                    tensors.values().for_each(|tensor| results.tensor(tensor));
                }
            });
            results.tensors(&list);
            results
        });
        results.all(found);
    }),
    job("parts of a batch", &[], |_, within, results| {
        let w = large(CPU, F32).set_requires_grad(true);
        within(&mut || {
            let forward = |parameters: &[Tensor], _: &Tensor| parameters[0].view([3, 2]);
            let ys = data_parallel(&[CPU, CPU], &[w.shallow_clone()], &large(CPU, F32), forward);
            results.tensor(&ys.unwrap());
        });
    }),
];

#[test]
fn obeys_no_region() {
    assert_obeys_no_region(CPU, JOBS);
}
