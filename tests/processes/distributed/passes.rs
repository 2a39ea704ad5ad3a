//! Backward passes, which the ranks compare while they compute.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{
    DdpConfig, DistributedDataParallel, DistributedError, GroupConfig, Store, SyncBatchNorm,
};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};
use tch_amp::gradients::GradientError;
use tch_amp::optim::{MasterWeights, Sgd};
use tch_amp::{Error, GradScaler};

use super::{TIMEOUT, is_mismatch, ranks, scaler, threads};

/// So small that each weight has a bucket of its own.
const SMALL: Option<f64> = Some(0.000_01);

fn weights(vs: &VarStore) -> Vec<Tensor> {
    (0..3).map(|i| vs.root().var(&format!("w{i}"), &[4 + i], nn::Init::Const(1.0))).collect()
}

fn loss(weights: &[Tensor], factor: f64) -> Tensor {
    weights.iter().map(|weight| weight.sum(Kind::Float) * factor).sum()
}

/// The first number of each gradient.
fn gradients(weights: &[Tensor]) -> Vec<Option<f64>> {
    let gradients = weights.iter().map(Tensor::grad);
    gradients.map(|grad| grad.defined().then(|| grad.double_value(&[0]))).collect()
}

#[test]
fn a_pass_that_the_other_rank_does_not_run_changes_no_gradients() {
    let (options, small) =
        (DdpConfig::default(), DdpConfig { bucket_cap_mb: SMALL, ..Default::default() });
    for options in [
        options,
        small,
        DdpConfig { gradient_as_bucket_view: true, ..options },
        DdpConfig { find_unused_parameters: true, ..small },
        DdpConfig { compression: Some(Kind::BFloat16), ..small },
        DdpConfig { compression: Some(Kind::Half), divide_first: true, ..small },
    ] {
        ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let weights = weights(&vs);
            let mut ddp = options.build(&group, &vs).unwrap();
            let mut optimizer = Sgd::default().build(&vs, 0.1).unwrap();
            let mut backward = |factor: f64| {
                let loss = ddp.forward(|| loss(&weights, factor))?;
                ddp.backward(&loss)
            };
            let rank = group.rank();
            for round in 0..3 {
                optimizer.zero_grad().unwrap();
                // Only one of the ranks runs the pass.
                for (one, before) in [(0, None), (1, Some(2.0))] {
                    let mine = if rank == one { backward(5.0) } else { group.barrier() };
                    let error = mine.unwrap_err();
                    assert!(is_mismatch(&error), "{options:?}, round {round}: {error}");
                    let calls = error.to_string();
                    assert!(calls.contains(&format!("rank {} calls barrier", 1 - one)), "{calls}");
                    assert_eq!(gradients(&weights), [before; 3], "{options:?}, round {round}");
                    // Both go on, and accumulate.
                    backward(1.0 + 2.0 * rank as f64).unwrap();
                    let after = before.unwrap_or_default() + 2.0;
                    assert_eq!(gradients(&weights), [Some(after); 3], "{options:?}, {round}");
                }
            }
        });
    }
}

#[test]
fn a_first_pass_that_the_other_rank_does_not_run_leaves_the_buckets_alike() {
    for one in 0..2 {
        ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let weights = weights(&vs);
            let mut ddp = DdpConfig { bucket_cap_mb: SMALL, ..Default::default() }
                .build(&group, &vs)
                .unwrap();
            let mut optimizer = Sgd::default().build(&vs, 0.1).unwrap();
            let value = 1.0 + 2.0 * group.rank() as f64;
            for _ in 0..4 {
                optimizer.zero_grad().unwrap();
                let first = ddp.forward(|| loss(&weights, value)).unwrap();
                let mine = if group.rank() == one { ddp.backward(&first) } else { group.barrier() };
                assert!(is_mismatch(&mine.unwrap_err()));
                let next = ddp.forward(|| loss(&weights, value)).unwrap();
                ddp.backward(&next).unwrap();
                assert_eq!(gradients(&weights), [Some(2.0); 3]);
                // A plain backward pass is averaged as well, after a mismatch, too.
                optimizer.zero_grad().unwrap();
                let again = ddp.forward(|| loss(&weights, value)).unwrap();
                let mine = if group.rank() == one { ddp.backward(&again) } else { group.barrier() };
                assert!(is_mismatch(&mine.unwrap_err()));
                ddp.forward(|| loss(&weights, value)).unwrap().backward();
                assert_eq!(gradients(&weights), [Some(2.0); 3]);
            }
        });
    }
}

#[test]
fn ranks_whose_functions_communicate_disagree_without_waiting_for_each_other() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let config = nn::BatchNormConfig::default();
        let layer = SyncBatchNorm::new(vs.root(), 3, config, &group);
        let options = DdpConfig { broadcast_buffers: false, ..Default::default() };
        let mut ddp = options.build(&group, &vs).unwrap();
        let mut optimizer = Sgd::default().build(&vs, 0.1).unwrap();
        // Otherwise the layer communicates in the forward pass only.
        let xs = Tensor::randn([4, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        for round in 0..4 {
            optimizer.zero_grad().unwrap();
            let loss = ddp.forward(|| layer.forward_t(&xs, true).square().sum(Kind::Float));
            // A pass of another loss, in which nothing communicates.
            drop(ddp.forward(|| layer.forward_t(&xs, false)).unwrap());
            let mine = match group.rank() {
                0 => ddp.backward(&loss.unwrap()),
                _ => group.barrier(),
            };
            assert!(is_mismatch(&mine.unwrap_err()), "round {round}");
            let loss = ddp.forward(|| layer.forward_t(&xs, true).square().sum(Kind::Float));
            ddp.backward(&loss.unwrap()).unwrap();
        }
    });
}

#[test]
fn ranks_with_two_models_in_a_loss_disagree_without_waiting_for_each_other() {
    ranks(2, |group| {
        let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
        let weights = stores.each_ref().map(weights);
        let mut models =
            stores.each_ref().map(|vs| DistributedDataParallel::new(&group, vs).unwrap());
        let clear = || {
            for vs in &stores {
                Sgd::default().build(vs, 0.1).unwrap().zero_grad().unwrap();
            }
        };
        let mut both = || -> Result<Tensor, Error> {
            let one = models[0].forward(|| loss(&weights[0], 2.0))?;
            let loss = models[1].forward(|| one * loss(&weights[1], 1.0))?;
            models[0].backward(&loss)?;
            Ok(loss)
        };
        for round in 0..4 {
            clear();
            drop(both().unwrap());
            let averaged = weights.each_ref().map(|weights| gradients(weights));
            clear();
            let mine = if group.rank() == 0 { both().map(drop) } else { group.barrier() };
            assert!(is_mismatch(&mine.unwrap_err()), "round {round}");
            clear();
            drop(both().unwrap());
            assert_eq!(weights.each_ref().map(|weights| gradients(weights)), averaged);
        }
    });
}

#[test]
fn gradients_that_an_optimizer_keeps_in_f32_stay_f32_after_a_mismatch() {
    ranks(2, |group| {
        let mut vs = VarStore::new(Device::Cpu);
        let weights = weights(&vs);
        vs.bfloat16();
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let builder = Sgd::default().master_weights(MasterWeights::Float);
        let mut optimizer = builder.build(&vs, 0.0).unwrap();
        optimizer.accumulate_in_f32().unwrap();
        let mut backward = |factor: f64| {
            let loss = ddp.forward(|| loss(&weights, factor))?;
            ddp.backward(&loss)
        };
        for _ in 0..3 {
            optimizer.zero_grad().unwrap();
            let mine = if group.rank() == 1 { backward(1.0) } else { group.barrier() };
            assert!(is_mismatch(&mine.unwrap_err()));
            assert_eq!(gradients(&weights), [None; 3]);
            backward(1.0 + 2.0 * group.rank() as f64).unwrap();
            assert_eq!(gradients(&weights), [Some(2.0); 3]);
            assert!(weights.iter().all(|weight| weight.grad().kind() == Kind::Float));
        }
    });
}

/// Says so when the backward pass has come to it.
struct Signal(Mutex<Sender<()>>);

impl Function for Signal {
    type Outputs = Tensor;
    type Gradients = Tensor;

    fn forward(&self, _: &mut ForwardContext, x: &[&Tensor]) -> FunctionResult<Tensor> {
        Ok(x[0] * 1.0)
    }

    fn backward(&self, _: &BackwardContext<'_>, g: &GradOutputs<'_>) -> FunctionResult<Tensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).send(())?;
        Ok(&g[0] * 1.0)
    }
}

#[test]
fn a_rank_computes_its_gradients_while_another_one_has_not_begun() {
    let (sender, receiver) = channel();
    let (sender, receiver) = (Mutex::new(Some(sender)), Mutex::new(receiver));
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let weights: Vec<_> =
            (0..3).map(|i| vs.root().var(&format!("w{i}"), &[4], nn::Init::Const(2.0))).collect();
        let options = DdpConfig { bucket_cap_mb: SMALL, ..Default::default() };
        let mut ddp = options.build(&group, &vs).unwrap();
        let mut optimizer = Sgd::default().build(&vs, 0.1).unwrap();
        // The buckets are those of the weights after the first pass.
        for _ in 0..2 {
            optimizer.zero_grad().unwrap();
            let loss = ddp.forward(|| loss(&weights, 1.0)).unwrap();
            ddp.backward(&loss).unwrap();
        }
        optimizer.zero_grad().unwrap();
        let sender = (group.rank() == 0).then(|| sender.lock().unwrap().take().unwrap());
        let forward = || {
            let first = match sender {
                // The last gradient of the pass is the one of this weight.
                Some(sender) => Signal(Mutex::new(sender)).apply(&[&weights[0]]).unwrap(),
                None => weights[0].shallow_clone(),
            };
            (first * &weights[1] * &weights[2]).sum(Kind::Float)
        };
        let loss = ddp.forward(forward).unwrap();
        if group.rank() == 1 {
            receiver.lock().unwrap().recv_timeout(TIMEOUT).unwrap();
        }
        ddp.backward(&loss).unwrap();
        assert_eq!(gradients(&weights), [Some(4.0); 3]);
    });
}

#[test]
fn a_rank_that_does_not_come_to_a_pass_is_named_by_all_that_did() {
    for has_gradients in [false, true] {
        let store = Store::in_process().unwrap();
        let options = GroupConfig { timeout: Duration::from_secs(30), ..Default::default() };
        threads(3, |rank| {
            let group = options.join(&store, rank, 3).unwrap();
            let vs = VarStore::new(Device::Cpu);
            let weights = weights(&vs);
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            let mut optimizer = Sgd::default().build(&vs, 0.1).unwrap();
            let mut backward = || {
                let loss = ddp.forward(|| loss(&weights, 1.0))?;
                ddp.backward(&loss)
            };
            backward().unwrap();
            backward().unwrap();
            if rank == 2 {
                return;
            }
            // One of the two may know that nothing can be undone.
            if !has_gradients || rank == 0 {
                optimizer.zero_grad().unwrap();
            }
            let error = backward().unwrap_err();
            let Error::Distributed(DistributedError::Communication { missing, .. }) = error else {
                panic!("{error}");
            };
            assert_eq!(missing, [2]);
            let again = backward().unwrap_err();
            let is_closed = matches!(again, Error::Distributed(DistributedError::Failed { .. }));
            assert!(is_closed, "{again}");
        });
    }
}

#[test]
fn a_sum_of_one_rank_alone_is_not_stepped_after_a_mismatch() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let weights = weights(&vs);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let mut optimizer = Sgd::default().build(&vs, 0.5).unwrap();
        let mut scaler = scaler(8.0);
        let own = 1.0 + 2.0 * group.rank() as f64;
        let is_unsynced = |refused: Error| {
            assert!(matches!(refused, Error::Gradient(GradientError::Unsynced)), "{refused}");
        };
        let pass = |ddp: &mut DistributedDataParallel, scaler: &mut GradScaler| {
            let loss = ddp.forward(|| loss(&weights, own))?;
            ddp.backward_scaled(scaler, &loss)
        };
        for round in 1..=3 {
            optimizer.zero_grad().unwrap();
            // A mismatch without gradients before it, and one beside those of this rank alone.
            for accumulates in [false, true] {
                if accumulates {
                    ddp.no_sync(|ddp| pass(ddp, &mut scaler)).unwrap();
                }
                let mine = match group.rank() {
                    0 => pass(&mut ddp, &mut scaler),
                    _ => group.barrier(),
                };
                assert!(is_mismatch(&mine.unwrap_err()), "round {round}");
                let alone = accumulates.then_some(8.0 * own);
                assert_eq!(gradients(&weights), [alone; 3], "round {round}");
                if accumulates {
                    is_unsynced(scaler.unscale_(&mut optimizer).unwrap_err());
                    is_unsynced(scaler.step(&mut optimizer).unwrap_err());
                }
            }
            pass(&mut ddp, &mut scaler).unwrap();
            assert!(scaler.step(&mut optimizer).unwrap().is_stepped().unwrap());
            scaler.update().unwrap();
            // Each rank has two passes in the sum, and the mean of 1 and 3 is 2.
            let expected = 1.0 - 0.5 * 4.0 * f64::from(round);
            assert!(weights.iter().all(|weight| weight.double_value(&[0]) == expected));
        }
    });
}
