//! What the collectives compute.

use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::distributed::{ProcessGroup, ReduceOp};

use super::{assert_open, calls, ranks};
use testkit::to_f64;

const KINDS: [Kind; 8] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int,
    Kind::Int64,
];

/// Small numbers, which every dtype adds exactly.
fn of_rank(rank: usize, kind: Kind) -> Tensor {
    let numbers: Vec<i64> = (0..7).map(|i| (3 * i + 5 * rank as i64) % 8).collect();
    Tensor::from_slice(&numbers).to_kind(kind)
}

fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
}

#[test]
fn all_reduce_combines_the_ranks() {
    for size in [1, 2, 3, 4] {
        for kind in KINDS {
            let all: Vec<_> = (0..size).map(|rank| to_f64(&of_rank(rank, kind))).collect();
            let column = |i: usize| all.iter().map(move |numbers| numbers[i]);
            let expected = |op: ReduceOp| -> Vec<f64> {
                let combine = |i| match op {
                    ReduceOp::Sum => column(i).sum(),
                    ReduceOp::Min => column(i).fold(f64::INFINITY, f64::min),
                    ReduceOp::Max => column(i).fold(0.0, f64::max),
                    _ => column(i).sum::<f64>() / size as f64,
                };
                (0..7).map(combine).collect()
            };
            for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max] {
                if op == ReduceOp::Mean && !(is_floating(kind) && size != 3) {
                    continue;
                }
                let results = ranks(size, |group| {
                    let mut tensor = of_rank(group.rank(), kind);
                    group.all_reduce(&mut tensor, op).unwrap();
                    assert_eq!(tensor.kind(), kind);
                    to_f64(&tensor)
                });
                for result in results {
                    assert_eq!(result, expected(op), "{op:?} of {size} ranks in {kind:?}");
                }
            }
        }
    }
}

#[test]
fn a_nan_of_any_rank_is_seen() {
    for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Mean] {
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16] {
            for broken in 0..3 {
                let results = ranks(3, |group| {
                    let value = if group.rank() == broken { f64::NAN } else { 1.0 };
                    let mut tensor = Tensor::from_slice(&[value, 2.0]).to_kind(kind);
                    group.all_reduce(&mut tensor, op).unwrap();
                    to_f64(&tensor)
                });
                for result in results {
                    assert!(result[0].is_nan() && result[1].is_finite(), "{op:?} {result:?}");
                }
            }
        }
    }
}

#[test]
fn broadcast_gather_and_scatter_move_the_numbers() {
    for size in [1, 2, 3] {
        for kind in KINDS {
            let all: Vec<_> = (0..size).flat_map(|rank| to_f64(&of_rank(rank, kind))).collect();
            let last = to_f64(&of_rank(size - 1, kind));
            let results = ranks(size, |group| {
                let mut sent = of_rank(group.rank(), kind);
                group.broadcast(&mut sent, size - 1).unwrap();
                let gathered = group.all_gather(&of_rank(group.rank(), kind).view([7, 1])).unwrap();
                assert!(gathered.iter().all(|part| part.size() == [7, 1] && part.kind() == kind));
                let gathered: Vec<f64> = gathered.iter().flat_map(to_f64).collect();
                (to_f64(&sent), gathered)
            });
            for (sent, gathered) in results {
                assert_eq!(sent, last);
                assert_eq!(gathered, all);
            }
        }
    }
}

#[test]
fn reduce_scatter_gives_each_rank_its_rows_of_the_sum() {
    for size in [1, 2, 3] {
        let parts = ranks(size, |group| {
            let rows = 2 * size as i64;
            let numbers = Tensor::arange(rows * 3, (Kind::Float, Device::Cpu)).view([rows, 3]);
            numbers_of(&group, &(numbers * (group.rank() as f64 + 1.0)))
        });
        let weights: usize = (1..=size).sum();
        let expected: Vec<f64> = (0..6 * size).map(|i| (i * weights) as f64).collect();
        assert_eq!(parts.concat(), expected);
    }
}

fn numbers_of(group: &ProcessGroup, tensor: &Tensor) -> Vec<f64> {
    let part = group.reduce_scatter(tensor).unwrap();
    assert_eq!(part.size(), [2, 3]);
    to_f64(&part)
}

#[test]
fn tensors_with_gaps_history_or_no_elements_are_communicated() {
    let results = ranks(2, |group| {
        let rank = group.rank() as f64;
        let whole = Tensor::zeros([4, 6], (Kind::Float, Device::Cpu)) + rank;
        let mut gapped = whole.slice(1, 0, 6, 2);
        group.all_reduce(&mut gapped, ReduceOp::Sum).unwrap();
        assert_eq!(whole.sum(Kind::Float).double_value(&[]), 12.0 + 12.0 * rank);
        let gathered = group.all_gather(&whole.slice(1, 1, 6, 2)).unwrap();
        assert_eq!(gathered[1].double_value(&[3, 2]), 1.0);
        // A leaf that requires gradients; its version rises.
        let mut leaf = Tensor::from_slice(&[rank as f32]).set_requires_grad(true);
        group.broadcast(&mut leaf, 1).unwrap();
        assert!(leaf.requires_grad() && leaf.is_leaf());
        assert_eq!(leaf.double_value(&[0]), 1.0);
        let product = (&leaf * &leaf).sum(Kind::Float);
        group.broadcast(&mut leaf, 0).unwrap();
        assert!(product.f_backward().is_err(), "the saved tensor has changed");
        let mut empty = Tensor::zeros([0, 3], (Kind::Float, Device::Cpu));
        group.all_reduce(&mut empty, ReduceOp::Max).unwrap();
        assert_eq!(group.all_gather(&empty).unwrap()[1].size(), [0, 3]);
        assert_eq!(group.reduce_scatter(&empty).unwrap().size(), [0, 3]);
        let mut scalar = Tensor::from(rank);
        group.all_reduce(&mut scalar, ReduceOp::Mean).unwrap();
        scalar.double_value(&[])
    });
    assert_eq!(results, [0.5, 0.5]);
}

#[test]
fn ranks_that_call_different_things_get_an_error_that_names_them() {
    ranks(3, |group| {
        let rank = group.rank() as i64;
        let float = (Kind::Float, Device::Cpu);
        let ones = Tensor::ones([4 + rank / 2], float);
        let mut tensor = ones.copy();
        let errors = [
            group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap_err(),
            group.all_gather(&ones).unwrap_err(),
            group.all_reduce(&mut Tensor::from(rank), ReduceOp::Sum).map_or_else(
                |e| e,
                |()| {
                    let kind = if rank == 1 { Kind::Double } else { Kind::Float };
                    group.broadcast(&mut Tensor::ones([2], (kind, Device::Cpu)), 0).unwrap_err()
                },
            ),
            match rank {
                0 => group.barrier().unwrap_err(),
                1 => group.broadcast(&mut tensor, 0).unwrap_err(),
                _ => group.broadcast(&mut tensor, 2).unwrap_err(),
            },
        ];
        for (error, part) in errors.into_iter().zip([
            "rank 2 calls all_reduce(Sum) of Float [5]",
            "rank 0 calls all_gather of Float [4]",
            "rank 1 calls broadcast from 0 of Double [2]",
            "rank 0 calls barrier; rank 1 calls broadcast from 0",
        ]) {
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(calls(error).len(), 3);
        }
        assert_eq!(tensor, ones);
        assert_open(&group);
    });
}

#[test]
fn unusable_tensors_and_ranks_are_refused() {
    ranks(1, |group| {
        let float = (Kind::Float, Device::Cpu);
        let refused = [
            group.all_reduce(&mut Tensor::new(), ReduceOp::Sum),
            group.all_reduce(&mut Tensor::ones([3], float).to_sparse_sparse_dim(1), ReduceOp::Sum),
            group.all_reduce(&mut Tensor::ones([3], (Kind::Bool, Device::Cpu)), ReduceOp::Max),
            group.all_reduce(&mut Tensor::ones([3], (Kind::Int, Device::Cpu)), ReduceOp::Mean),
            group.broadcast(&mut Tensor::ones([3], float), 1),
            group.reduce_scatter(&Tensor::from(1f32)).map(drop),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
        }
    });
}

#[test]
fn a_rank_that_refuses_its_arguments_does_not_keep_the_others_waiting() {
    ranks(2, |group| {
        let sparse = Tensor::ones([3], (Kind::Float, Device::Cpu)).to_sparse_sparse_dim(1);
        let dense = Tensor::ones([4], (Kind::Float, Device::Cpu));
        let refuses = group.rank() == 1;
        let mut tensor = if refuses { sparse } else { dense };
        let root = if refuses { 7 } else { 0 };
        let errors = [
            group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap_err(),
            group.broadcast(&mut Tensor::from(1f32), root).unwrap_err(),
            group.all_gather(&tensor).unwrap_err(),
            group.reduce_scatter(&tensor).unwrap_err(),
        ];
        for error in errors {
            let expected = if refuses {
                matches!(error, Error::InvalidArgument { .. })
            } else {
                error.to_string().contains("rank 1 calls ")
                    && error.to_string().contains("which fails there")
            };
            assert!(expected, "{error}");
        }
        group.barrier().unwrap();
    });
}
