//! A rank that fails alone: all ranks get an error that names the cause, in seconds, even if the rank that has failed
//! goes on and keeps its model and its group.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::distributed::{
    DdpConfig, DistributedDataParallel, DistributedError, ProcessGroup, ReduceOp, SyncBatchNorm,
};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};
use tch_amp::optim::Sgd;
use tch_amp::{Error, Result};

use super::ranks;

/// Far less than the timeout of the groups.
const SECONDS: Duration = Duration::from_secs(25);
const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Runs ranks that all get an error, and returns the messages. They keep what they have until the last one has its error.
fn messages(size: usize, rank: impl Fn(&ProcessGroup) -> Vec<Error> + Sync) -> Vec<Vec<String>> {
    let done = AtomicUsize::new(0);
    ranks(size, |group| {
        let start = Instant::now();
        let errors = rank(&group);
        let took = start.elapsed();
        done.fetch_add(1, Ordering::Relaxed);
        while done.load(Ordering::Relaxed) < size && start.elapsed() < 2 * SECONDS {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(took < SECONDS, "rank {} took {took:?}", group.rank());
        errors.iter().map(Error::to_string).collect()
    })
}

/// How a backward pass fails on one rank.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// In a function of the model.
    InFunction,
    /// An error of the program, which is not libtorch's.
    OfProgram,
    /// A panic that the program catches.
    Panic,
    /// A panic after the gradients have been averaged.
    LatePanic,
}

/// A function whose backward pass fails.
struct Fails;

impl Function for Fails {
    type Outputs = Tensor;
    type Gradients = Tensor;

    fn forward(&self, _: &mut ForwardContext, x: &[&Tensor]) -> FunctionResult<Tensor> {
        Ok(x[0] * 1.0)
    }

    fn backward(&self, _: &BackwardContext<'_>, _: &GradOutputs<'_>) -> FunctionResult<Tensor> {
        Err("the cause".into())
    }
}

/// A model with a bucket for each weight.
struct Model {
    weights: Vec<Tensor>,
    ddp: DistributedDataParallel,
    vs: VarStore,
}

impl Model {
    fn new(group: &ProcessGroup, options: DdpConfig) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let weights =
            (0..3).map(|i| vs.root().var(&format!("w{i}"), &[3], nn::Init::Const(1.0))).collect();
        let ddp = DdpConfig { bucket_cap_mb: Some(0.000_01), ..options }.build(group, &vs).unwrap();
        Self { weights, ddp, vs }
    }

    fn backward(&mut self, failure: Option<Failure>) -> Result<()> {
        let weights = &self.weights;
        let loss = self.ddp.forward(|| {
            let first = match failure {
                Some(Failure::InFunction) => Fails.apply(&[&weights[0]]).unwrap(),
                _ => weights[0].shallow_clone(),
            };
            (first * &weights[1] * &weights[2]).sum(Kind::Float)
        })?;
        let ddp = &mut self.ddp;
        match failure {
            None | Some(Failure::InFunction) => ddp.backward(&loss),
            Some(Failure::OfProgram) => ddp.backward_by(&loss, || {
                Err(Error::InvalidArgument { name: "loss", problem: "has the cause".to_owned() })
            }),
            Some(Failure::Panic | Failure::LatePanic) => {
                let late = matches!(failure, Some(Failure::LatePanic));
                let pass = || {
                    ddp.backward_by(&loss, || {
                        if late {
                            loss.f_backward()?;
                        }
                        panic!("the cause")
                    })
                };
                let panic = catch_unwind(AssertUnwindSafe(pass)).unwrap_err();
                let problem = (*panic.downcast::<&str>().unwrap()).to_owned();
                Err(Error::InvalidArgument { name: "panic", problem })
            }
        }
    }
}

#[test]
fn an_error_in_a_backward_pass_of_one_rank_is_reported_with_its_cause_by_all() {
    let failures = [Failure::InFunction, Failure::OfProgram, Failure::Panic, Failure::LatePanic];
    for (case, failure) in failures.into_iter().enumerate() {
        // The first pass waits for the comparison, the third one runs beside it.
        for before in [0, 2] {
            for size in [2, 3, 4] {
                let guilty = (case + before) % size;
                let options = DdpConfig { compare_passes: size != 3, ..Default::default() };
                let found = messages(size, |group| {
                    let mut model = Model::new(group, options);
                    let mut opt = Sgd::default().build(&model.vs, 0.1).unwrap();
                    for _ in 0..before {
                        opt.zero_grad().unwrap();
                        model.backward(None).unwrap();
                    }
                    opt.zero_grad().unwrap();
                    let fails = (group.rank() == guilty).then_some(failure);
                    let first = match model.backward(fails) {
                        Err(error) => error,
                        // The averaging was complete.
                        Ok(()) => model.backward(None).unwrap_err(),
                    };
                    let next = model.backward(None).unwrap_err();
                    let is_failed =
                        matches!(next, Error::Distributed(DistributedError::Failed { .. }));
                    assert!(is_failed, "{failure:?} after {before} of {size}: {next}");
                    vec![first]
                });
                for (rank, messages) in found.iter().enumerate() {
                    let message = &messages[0];
                    let is_named = message.contains("the cause")
                        && !message.contains("not answer")
                        && (rank == guilty
                            || message.contains(&format!("rank {guilty} failed first")));
                    assert!(is_named, "{failure:?} after {before} of {size}, {rank}: {message}");
                }
            }
        }
    }
}

/// The rank that has panicked has begun a pass whose gradients the others wait for.
#[test]
fn a_panic_in_a_forward_pass_of_one_rank_is_reported_with_its_cause_by_all() {
    for before in [0, 2] {
        for size in [2, 3] {
            let guilty = (1 + before) % size;
            let options = DdpConfig { compare_passes: size != 3, ..Default::default() };
            let found = messages(size, |group| {
                let mut model = Model::new(group, options);
                for _ in 0..before {
                    model.backward(None).unwrap();
                }
                if group.rank() != guilty {
                    return vec![model.backward(None).unwrap_err()];
                }
                let pass = || model.ddp.forward(|| panic!("the cause")).map(|(): ()| ());
                let panic = catch_unwind(AssertUnwindSafe(pass)).unwrap_err();
                assert_eq!(*panic.downcast::<&str>().unwrap(), "the cause");
                vec![model.backward(None).unwrap_err()]
            });
            for (rank, messages) in found.iter().enumerate().filter(|(rank, _)| *rank != guilty) {
                let is_named = messages[0].contains(&format!("rank {guilty} failed first"))
                    && messages[0].contains("the forward pass panicked: the cause");
                assert!(is_named, "after {before} of {size}, {rank}: {}", messages[0]);
            }
        }
    }
}

/// No other rank waits for its gradients.
#[test]
fn a_panic_in_a_forward_pass_that_is_not_averaged_leaves_the_group_open() {
    ranks(2, |group| {
        let mut model = Model::new(&group, DdpConfig::default());
        let panics = |ddp: &mut DistributedDataParallel| {
            let pass = || ddp.forward(|| panic!("on purpose")).map(|(): ()| ());
            assert!(catch_unwind(AssertUnwindSafe(pass)).is_err());
        };
        if group.rank() == 1 {
            no_grad(|| panics(&mut model.ddp));
        }
        model.ddp.no_sync(panics);
        model.backward(None).unwrap();
    });
}

#[test]
fn an_operation_that_is_interrupted_within_a_message_ends_on_all_ranks() {
    // Connections that are closed at such moments, while large messages go through them, leave a part of one behind.
    for delay in [150, 300] {
        let found = messages(3, |group| {
            let mut model =
                Model::new(group, DdpConfig { compare_passes: false, ..Default::default() });
            let mut large = Tensor::zeros([1 << 26], F32);
            let mut error_of_sums = || loop {
                if let Err(error) = group.all_reduce(&mut large, ReduceOp::Sum) {
                    return error;
                }
            };
            if group.rank() != 1 {
                return vec![error_of_sums()];
            }
            std::thread::scope(|scope| {
                let sums = scope.spawn(error_of_sums);
                std::thread::sleep(Duration::from_millis(delay));
                let error = model.backward(Some(Failure::OfProgram)).unwrap_err();
                vec![sums.join().unwrap(), error]
            })
        });
        for (rank, messages) in found.iter().enumerate() {
            let is_named =
                rank == 1 || messages[0].contains("rank 1 failed first: loss has the cause");
            assert!(is_named && !messages[0].contains("not answer"), "{rank}: {messages:?}");
        }
    }
}

#[test]
fn a_parameter_that_one_rank_does_not_use_is_named_on_all() {
    let found = messages(3, |group| {
        let mut model = Model::new(group, DdpConfig::default());
        let used = if group.rank() == 1 { 2 } else { 3 };
        let weights = &model.weights;
        let loss = model.ddp.forward(|| weights[..used].iter().map(|w| w.sum(Kind::Float)).sum());
        let loss: Tensor = loss.unwrap();
        vec![model.ddp.backward(&loss).unwrap_err()]
    });
    for messages in &found {
        assert!(messages[0].contains("the loss of rank 1 does not depend on"), "{messages:?}");
        assert!(messages[0].contains("w2") && !messages[0].contains("not answer"), "{messages:?}");
    }
}

#[test]
fn a_result_that_a_tensor_cannot_take_is_refused_on_all_ranks_before_it_is_sent() {
    let unwritable: [fn() -> Tensor; 3] = [
        || Tensor::ones([1], F32).expand([4], false),
        || Tensor::ones([3], F32).as_strided([2, 2], [1, 1], 0),
        || Tensor::ones([2, 1, 2], F32).expand([2, 3, 2], false),
    ];
    for (case, make) in unwritable.into_iter().enumerate() {
        let found = messages(3, |group| {
            let guilty = group.rank() == case;
            let size = make().size();
            let mut tensor = if guilty { make() } else { Tensor::ones(&size, F32) };
            let mut errors = Vec::new();
            for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max] {
                errors.push(group.all_reduce(&mut tensor, op).unwrap_err());
            }
            for root in 0..3 {
                errors.push(group.broadcast(&mut tensor, root).unwrap_err());
            }
            // Nothing was sent, and nothing was changed.
            assert_eq!(tensor, Tensor::ones(&size, F32));
            // It can be read.
            let gathered = group.all_gather(&tensor).unwrap();
            assert!(gathered.iter().all(|part| *part == tensor));
            errors
        });
        for (rank, messages) in found.iter().enumerate() {
            for message in messages {
                assert!(message.contains("has elements that share memory"), "{message}");
                assert!(rank == case || message.contains(&format!("rank {case} calls")));
            }
        }
    }
}

type Change = fn(&mut VarStore);

/// What can happen to a buffer, and what the errors say of it.
const CHANGES: [(Change, &str); 5] = [
    (|vs| replace(vs, &Tensor::ones([4], (Kind::Double, Device::Cpu))), "was cast"),
    (|vs| replace(vs, &Tensor::ones([5], F32)), "another shape"),
    (|vs| replace(vs, &Tensor::ones([2, 2], F32)), "another shape"),
    (|vs| replace(vs, &Tensor::ones([1], F32).expand([4], false)), "share"),
    (|vs| drop(vs.root().ones_no_train("another", &[2])), "a variable was added"),
];

fn replace(vs: &VarStore, by: &Tensor) {
    vs.variables()["buffer"].shallow_clone().set_data(by);
}

#[test]
fn a_buffer_that_changes_on_one_rank_is_named_on_all_before_anything_is_sent() {
    for compare in [true, false] {
        for (case, (change, what)) in CHANGES.into_iter().enumerate() {
            let guilty = case % 3;
            let found = messages(3, |group| {
                let mut vs = VarStore::new(Device::Cpu);
                let weight = vs.root().ones("weight", &[1]);
                let mut buffer = vs.root().ones_no_train("buffer", &[4]);
                let options = DdpConfig { compare_passes: compare, ..Default::default() };
                let mut ddp = options.build(group, &vs).unwrap();
                let loss = ddp.forward(|| &weight * 1.0).unwrap();
                ddp.backward(&loss).unwrap();
                let mine = 10.0 * group.rank() as f64;
                drop(no_grad(|| buffer.fill_(mine)));
                if group.rank() == guilty {
                    change(&mut vs);
                }
                if compare {
                    let error = ddp.forward(|| unreachable!("it ran")).unwrap_err();
                    if group.rank() != guilty {
                        assert_eq!(buffer.double_value(&[3]), mine, "it was overwritten");
                    }
                    return vec![error];
                }
                // What has been sent already may have arrived.
                let mut errors = (0..20).filter_map(|_| ddp.forward(|| ()).err());
                vec![errors.next().unwrap()]
            });
            for (rank, messages) in found.iter().enumerate() {
                let is_named = messages[0].contains(what) && !messages[0].contains("not answer");
                assert!(is_named, "{what} on {guilty}, {compare}, {rank}: {messages:?}");
            }
        }
    }
}

#[test]
fn a_parameter_that_changes_on_one_rank_is_named_on_all_in_a_pass_without_buffers() {
    let changes: [(Change, &str); 3] = [
        (|vs| vs.half(), "was cast"),
        (|vs| drop(vs.variables()["w1"].set_requires_grad(false)), "was frozen"),
        (|vs| drop(vs.root().ones("three", &[2])), "a variable was added"),
    ];
    for (change, what) in changes {
        let found = messages(2, |group| {
            let mut model = Model::new(group, DdpConfig::default());
            for _ in 0..2 {
                model.backward(None).unwrap();
            }
            if group.rank() == 1 {
                change(&mut model.vs);
            }
            let error = model.backward(None).unwrap_err();
            assert!(!group.any(false).unwrap(), "the group can be used");
            vec![error]
        });
        assert!(found.iter().flatten().all(|message| message.contains(what)), "{found:?}");
    }
}

fn add_buffer(vs: &VarStore) {
    drop(vs.root().ones_no_train("buffer", &[4]));
}

/// What two ranks are told of models with a weight and a buffer, which rank 1 makes by `other`.
fn refused(other: impl Fn(&VarStore) + Sync) -> Vec<String> {
    let found = messages(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let _weight = vs.root().ones("weight", &[1]);
        if group.rank() == 0 {
            add_buffer(&vs)
        } else {
            other(&vs)
        }
        vec![DistributedDataParallel::new(group, &vs).unwrap_err()]
    });
    found.concat()
}

#[test]
fn models_whose_buffers_differ_are_refused_with_the_first_difference() {
    let others: [fn(&VarStore); 4] = [
        |vs| drop(vs.root().ones_no_train("buffer", &[2, 2])),
        |vs| drop(vs.root().ones_no_train("other", &[4])),
        |_| (),
        |vs| {
            add_buffer(vs);
            replace(vs, &Tensor::ones([4], (Kind::Int64, Device::Cpu)));
        },
    ];
    for other in others {
        let found = refused(other);
        assert!(found.iter().all(|message| message.contains("\"buffer\"")), "{found:?}");
    }
}

#[test]
fn variables_that_cannot_be_sent_are_refused_by_name() {
    let unusable: [fn() -> Tensor; 3] = [
        || Tensor::ones([4], (Kind::Int16, Device::Cpu)),
        || Tensor::ones([4], (Kind::ComplexFloat, Device::Cpu)),
        || Tensor::ones([1], F32).expand([4], false),
    ];
    for data in unusable {
        let found = refused(|vs| {
            add_buffer(vs);
            replace(vs, &data());
        });
        let is_named = |message: &String| message.contains("has the variable \"buffer\"");
        assert!(found.iter().all(is_named), "{found:?}");
    }
}

#[test]
fn a_flag_that_is_a_buffer_is_broadcast() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let _weight = vs.root().ones("weight", &[1]);
        let mut buffer = vs.root().ones_no_train("buffer", &[2]);
        buffer.set_data(&Tensor::from_slice(&[group.rank() == 0, false]));
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        ddp.forward(|| ()).unwrap();
        assert_eq!(Vec::<bool>::try_from(&buffer).unwrap(), [true, false]);
    });
}

#[test]
fn an_input_that_a_synchronized_layer_refuses_on_one_rank_is_named_on_all() {
    let found = messages(3, |group| {
        let vs = VarStore::new(Device::Cpu);
        let layer = SyncBatchNorm::new(vs.root(), 3, Default::default(), group);
        let xs = Tensor::ones([4, if group.rank() == 2 { 5 } else { 3 }], F32);
        let error = layer.f_forward_t(&xs, true).unwrap_err();
        // The layer goes on.
        drop(layer.forward_t(&Tensor::ones([4, 3], F32), true));
        vec![error]
    });
    for messages in &found {
        assert!(messages[0].contains("[4, 5]"), "{messages:?}");
    }
}
