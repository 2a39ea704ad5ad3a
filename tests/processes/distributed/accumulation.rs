//! Micro-batches on ranks that have different numbers of tokens.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::accumulation::Accumulation;
use tch_amp::distributed::DistributedDataParallel;
use tch_amp::optim::Sgd;

use super::ranks;
use testkit::to_f64;

/// The micro-batches of a rank. The second one runs out of them, and repeats one without weight.
fn batches(rank: usize) -> Vec<Tensor> {
    let sizes: &[i64] = if rank == 0 { &[3, 1, 4] } else { &[5, 2, 2] };
    let batch = |size: &i64| {
        Tensor::arange(size * 2, (Kind::Float, Device::Cpu)).view([*size, 2]) + rank as f64
    };
    sizes.iter().map(batch).collect()
}

fn loss(w: &Tensor, xs: &Tensor) -> Tensor {
    xs.matmul(w).square().mean(Kind::Float)
}

#[test]
fn every_token_of_all_ranks_counts_the_same() {
    let gradients = ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[2, 1]);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let mut scaler = GradScaler::disabled();
        let batches = batches(group.rank());
        let mut tokens: Vec<_> = batches.iter().map(|xs| xs.size()[0] as f64).collect();
        if group.rank() == 1 {
            tokens[2] = 0.0;
        }
        let mut window = Accumulation::of_weights_over(&group, tokens).unwrap();
        for xs in &batches {
            let is_last = window.is_last();
            let mut pass = |ddp: &mut DistributedDataParallel| {
                let loss = ddp.forward(|| loss(&w, xs)).unwrap();
                let weighed = window.weigh(&loss).unwrap();
                ddp.backward_scaled(&mut scaler, &weighed).unwrap();
            };
            if is_last { pass(&mut ddp) } else { ddp.no_sync(pass) }
        }
        to_f64(&w.grad())
    });
    let w = Tensor::ones([2, 1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let all: Vec<_> = (0..2).flat_map(batches).take(5).collect();
    loss(&w, &Tensor::cat(&all, 0)).backward();
    let whole = to_f64(&w.grad());
    assert_eq!(gradients[0], gradients[1]);
    for (ours, whole) in gradients[0].iter().zip(&whole) {
        // Some twenty roundings of f32.
        assert!((ours - whole).abs() <= 32.0 * 2f64.powi(-24) * whole.abs(), "{ours}, {whole}");
    }
}

#[test]
fn weights_that_one_rank_refuses_are_refused_on_all() {
    let refused = ranks(2, |group| {
        let weight = if group.rank() == 0 { 1.0 } else { -1.0 };
        Accumulation::of_weights_over(&group, [weight]).is_err()
    });
    assert_eq!(refused, [true, true]);
}

/// Ranks that leave out micro-batches on their own would train different models.
#[test]
fn leaving_out_micro_batches_is_refused_while_gradients_are_averaged() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[2, 1]);
        let other = Tensor::ones([2, 1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let [opt, other_opt] =
            [&w, &other].map(|w| Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap());
        let mut scaler = GradScaler::disabled();
        let mut window = Accumulation::of_equal(3).unwrap();
        let loss = |w: &Tensor| loss(w, &batches(0)[0]);
        let ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let error = window.backward_or_drop(&mut scaler, &opt, &loss(&w)).unwrap_err();
        assert!(error.to_string().contains("window.weigh(&loss)"), "{error}");
        assert!(!w.grad().defined());
        // Another model beside it, and the same model later, are not on several ranks.
        window.backward_or_drop(&mut scaler, &other_opt, &loss(&other)).unwrap();
        drop(ddp);
        window.backward_or_drop(&mut scaler, &opt, &loss(&w)).unwrap();
        assert!(w.grad().defined());
    });
}
