//! Runs a program with this crate, and parses the oracle's answers.

use tch::{Device, Kind, NoGradGuard, TchError, Tensor};
use tch_amp::Autocast;
use tch_amp::autocast::{AutocastGuard, AutocastState};

use crate::autocast::programs::program::{Function, Op, kind_called, kind_name};
use testkit::bits::{bits, canonical, from_hex};

/// The autocast state of the device after an operation, and the outcome of the operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub enabled: bool,
    pub cache: bool,
    pub dtype: Kind,
    pub outcome: Outcome,
}

/// The outcome of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Nothing,
    Tensor(Kind, Vec<u8>),
    /// The first line of the message.
    Error(String),
}

impl Answer {
    /// Parses a line of the oracle's output.
    pub fn parse(line: &str) -> Self {
        let mut fields = line.splitn(5, ' ');
        let mut field = || fields.next().expect("an answer of the oracle has a state");
        let (enabled, cache, dtype) = (field() == "1", field() == "1", kind_called(field()));
        let outcome = match (fields.next(), fields.next()) {
            (None, _) => Outcome::Nothing,
            (Some("error"), message) => Outcome::Error(message.unwrap_or_default().to_owned()),
            (Some(kind), hex) => {
                let kind = kind_called(kind);
                Outcome::Tensor(kind, canonical(kind, from_hex(hex.unwrap_or_default())))
            }
        };
        Self { enabled, cache, dtype, outcome }
    }

    fn now(device: Device, outcome: Outcome) -> Self {
        Self {
            enabled: tch_amp::autocast::is_autocast_enabled(device),
            cache: AutocastState::current().expect("the state can be read").is_cache_enabled(),
            dtype: tch_amp::autocast::autocast_dtype(device).expect("the device has autocast"),
            outcome,
        }
    }
}

/// The tensors of a program, all on one device, and its open regions.
pub struct Machine {
    device: Device,
    values: Vec<Tensor>,
    regions: Vec<AutocastGuard>,
    no_grad: Option<NoGradGuard>,
}

impl Machine {
    pub fn new(device: Device) -> Self {
        Self { device, values: Vec::new(), regions: Vec::new(), no_grad: None }
    }

    pub fn run(&mut self, op: &Op) -> Answer {
        let outcome = match self.step(op) {
            Ok(None) => Outcome::Nothing,
            Ok(Some(tensor)) => Outcome::Tensor(tensor.kind(), bits(&tensor)),
            Err(TchError::Torch(message)) => {
                // The kernels are those of the CPU, but some messages name the device, and the host code of CUDA calls
                // the arguments of `mm` by other names.
                let line = message.lines().next().unwrap_or_default().replace("CUDA", "CPU");
                Outcome::Error(line.replace("mat1 and mat2 to have", "m1 and m2 to have"))
            }
            Err(error) => panic!("{error} is not from libtorch"),
        };
        Answer::now(self.device, outcome)
    }

    fn step(&mut self, op: &Op) -> Result<Option<Tensor>, TchError> {
        match op {
            // Drops the open regions first to last; the state must be restored all the same.
            Op::Program => *self = Self::new(self.device),
            Op::Tensor { kind, leaf, values } => {
                // The dtype is changed last: the result is not a view, and casts of views are not cached.
                let values = Tensor::from_slice(values).to_device(self.device);
                let tensor = values.reshape([4, 4]).to_kind(*kind);
                return Ok(Some(self.keep(tensor.set_requires_grad(*leaf))));
            }
            Op::Enter { dtype, enabled, cache } => self.enter(*dtype, *enabled, *cache),
            Op::Exit => drop(self.regions.pop()),
            Op::GradMode(true) => self.no_grad = None,
            // Without a second guard: dropping the first would enable gradients again.
            Op::GradMode(false) => {
                self.no_grad.get_or_insert_with(tch::no_grad_guard);
            }
            Op::Compute(function, operands) => return self.compute(*function, operands).map(Some),
            Op::Nudge(place) => {
                let weight = &mut self.values[*place];
                tch::no_grad(|| weight.f_add_scalar_(0.125).map(drop))?;
            }
            Op::Backward(place) => self.values[*place].f_sum(None)?.f_backward()?,
            Op::Grad(place) => {
                let grad = self.values[*place].grad();
                return Ok(grad.defined().then_some(grad));
            }
        }
        Ok(None)
    }

    fn keep(&mut self, value: Tensor) -> Tensor {
        self.values.push(value.shallow_clone());
        value
    }

    fn enter(&mut self, dtype: Option<Kind>, enabled: bool, cache: Option<bool>) {
        let mut region = Autocast::new(self.device).enabled(enabled);
        if let Some(dtype) = dtype {
            region = region.dtype(dtype);
        }
        if let Some(cache) = cache {
            region = region.cache(cache);
        }
        self.regions.push(region.enter().expect("the device has these regions"));
    }

    fn compute(&mut self, function: Function, operands: &[usize]) -> Result<Tensor, TchError> {
        let operands: Vec<_> = operands.iter().map(|i| self.values[*i].shallow_clone()).collect();
        match apply(function, &operands) {
            Ok(tensor) => Ok(self.keep(tensor)),
            Err(error) => {
                // So that later operations find a tensor with this number.
                self.values.push(operands[0].shallow_clone());
                Err(error)
            }
        }
    }
}

fn apply(function: Function, operands: &[Tensor]) -> Result<Tensor, TchError> {
    let (a, b) = (&operands[0], operands.last().expect("at least one operand"));
    match function {
        Function::Mm => a.f_mm(b),
        Function::Linear => a.f_linear::<&Tensor>(b, None),
        Function::Conv => {
            let image = a.reshape([1, 1, 4, 4]);
            let kernel = b.reshape([1, 1, 4, 4]).narrow(2, 0, 3).narrow(3, 0, 3);
            let one = [1, 1].as_slice();
            let output = image.f_conv2d::<&Tensor>(&kernel, None, one, one, one, 1)?;
            output.f_reshape([4, 4])
        }
        Function::Add => a.f_add(b),
        Function::Cat => Tensor::f_cat(&[a, b], 0)?.f_narrow(0, 0, 4),
        Function::Softmax => a.f_softmax(-1, None),
        Function::LayerNorm => a.f_layer_norm::<&Tensor>([4].as_slice(), None, None, 1e-5, true),
    }
}

/// A short form of an answer, without the bits.
pub fn describe(answer: &Answer) -> String {
    let (enabled, cache) = (answer.enabled, answer.cache);
    let state = format!("enabled {enabled}, cache {cache}, {}", kind_name(answer.dtype));
    match &answer.outcome {
        Outcome::Nothing => format!("{state}: nothing"),
        Outcome::Error(message) => format!("{state}: error {message:?}"),
        Outcome::Tensor(kind, bytes) => format!("{state}: {} {bytes:02x?}", kind_name(*kind)),
    }
}
