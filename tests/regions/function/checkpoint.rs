//! PyTorch's `test_autocast_checkpointing`: a function that keeps no activations and runs its forward again in
//! backward.

use tch::{Device, Kind, Tensor, with_grad};
use tch_amp::{Autocast, function};

use crate::function::random_leaf;
use testkit::bits::bits;
use testkit::for_each_device;

fn layers(x: &Tensor, weights: &[Tensor]) -> Tensor {
    weights.iter().fold(x.shallow_clone(), |x, w| x.mm(w).tanh())
}

/// Layers whose activations are recomputed in backward.
fn checkpoint(x: &Tensor, weights: &[Tensor]) -> Tensor {
    let clones = || weights.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
    let (first, second) = (clones(), clones());
    let checkpoint = function(
        move |ctx, x| {
            ctx.save_for_backward(x);
            Ok(layers(x[0], &first))
        },
        move |ctx, g| {
            let [x] = ctx.saved_tensors()?;
            let x = x.detach().set_requires_grad(true);
            let again = with_grad(|| (layers(&x, &second) * &g[0]).sum(None));
            // Computes the gradients of the weights as well, which are not inputs.
            again.f_backward()?;
            Ok(x.grad())
        },
    );
    checkpoint.apply(&[x]).unwrap()
}

/// The gradients of the input and the weights.
fn gradients(
    device: Device,
    dtype: Kind,
    leaves: &[Tensor],
    run: impl FnOnce(&Tensor, &[Tensor]) -> Tensor,
) -> Vec<Vec<u8>> {
    let fresh: Vec<Tensor> =
        leaves.iter().map(|leaf| leaf.detach().set_requires_grad(true)).collect();
    let region = Autocast::new(device).dtype(dtype);
    let out = region.run(|| run(&fresh[0], &fresh[1..])).unwrap();
    assert!(out.requires_grad());
    assert_eq!(out.kind(), dtype);
    out.sum(Kind::Float).backward();
    fresh.iter().map(|leaf| bits(&leaf.grad())).collect()
}

#[test]
fn a_checkpoint_recomputes_the_forward() {
    for_each_device(|device| {
        for (dtype, input) in [(Kind::BFloat16, Kind::BFloat16), (Kind::Half, Kind::Float)] {
            let mut leaves = vec![random_leaf(device, input, &[4, 8])];
            leaves.extend((0..4).map(|_| random_leaf(device, Kind::Float, &[8, 8])));
            let plain = gradients(device, dtype, &leaves, layers);
            let checkpointed = gradients(device, dtype, &leaves, |x, weights| {
                weights.chunks(2).fold(x.shallow_clone(), |x, weights| checkpoint(&x, weights))
            });
            assert_eq!(checkpointed, plain, "{device:?} {dtype:?}");
        }
    });
}
