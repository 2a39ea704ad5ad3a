//! What an iteration keeps for its backward pass.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Display, Formatter};

use run_report::{Column, Table};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use super::operators::percent;
use super::recording::Recording;
use super::rerun::Repeatable;
use crate::capture;
use crate::error::Result;
use crate::ffi::insight::SavedTensor;
use crate::insight::dtype::Dtype;
#[cfg(doc)]
use crate::memory::SavedTensors;

/// How many rows the text has.
const MOST_ROWS: usize = 20;

/// The share of all bytes from which on advice names something.
const LARGE: f64 = 0.2;

/// The operators whose saved tensors are the logits of a loss.
const LOGITS: [&str; 6] = [
    "aten::cross_entropy_loss",
    "aten::log_softmax",
    "aten::_log_softmax",
    "aten::nll_loss",
    "aten::nll_loss_nd",
    "aten::logsumexp",
];

/// What an iteration keeps for its backward pass, by layer and operator. Made by [`saved_tensors`].
///
/// Its text, by `Display`, is a table with the largest rows first, what smaller forms would keep, and advice. A program
/// that wants the numbers behind the text serializes the report, which has the list `rows` beside the fields below. A
/// row has `path` (the part of the model), `operator` (that saved the tensors first, by libtorch's name), `dtype`,
/// `what` (`Activation`, `Weight` for copies of weights, such as those that autocast makes, or `Other` for masks,
/// statistics and inputs), `in_region` (whether the operator was called in a region that computes in half precision),
/// `tensors` (how many storages), `saves` (how often nodes of the graph save them), `bytes`, `half_bytes` and
/// `fp8_bytes` (what the forms of [`SavedTensors`] would keep instead).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SavedReport {
    /// The bytes that are freed with the graph of the loss: each storage counts once, however many nodes save it. What
    /// something else holds as well, such as weights and the batch, is not counted.
    pub bytes: u64,
    /// Those of them that are copies of weights.
    pub weight_bytes: u64,
    /// Those of them that are f32 though the operator was called in a region that computes in half precision.
    pub f32_bytes: u64,
    rows: Vec<SavedRow>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedRow {
    path: String,
    operator: String,
    dtype: Dtype,
    what: What,
    in_region: bool,
    tensors: u64,
    saves: u64,
    bytes: u64,
    half_bytes: u64,
    fp8_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum What {
    Activation,
    Weight,
    Other,
}

impl Display for What {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Activation => "activation",
            Self::Weight => "weight",
            Self::Other => "other",
        })
    }
}

/// Lists what `loss` keeps for its backward pass, by part of the model and operator.
///
/// `loss` computes the loss as in training, in its regions, and is run once, with the random numbers that come next.
/// The generators and the buffers are then set back, so that training goes on as without the call. The list has what
/// autograd saves on the calling thread, and what the functions of [`lean`](crate::lean) keep. It has neither values
/// that custom functions keep by themselves nor what `loss` saves in a region of [`SavedTensors`].
///
/// The first call in a process replaces libtorch's autograd engine, as the documentation of [`SavedTensors`] says.
///
/// PyTorch has no counterpart.
///
/// # Errors
///
/// The error of `loss`; [`Error::OtherEngine`](crate::Error::OtherEngine) if something else has replaced autograd's
/// engine; [`Error::Torch`](crate::Error::Torch) if the run cannot be recorded.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::{autocast, insight};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::seq()
///     .add(nn::linear(vs.root() / "up", 16, 64, Default::default()))
///     .add_fn(|xs| xs.gelu("none"))
///     .add(nn::linear(vs.root() / "down", 64, 1, Default::default()));
/// let xs = Tensor::randn([256, 16], (Kind::Float, Device::Cpu));
/// let report = insight::saved_tensors(&vs, || {
///     autocast(Device::Cpu, || net.forward(&xs).square().mean(Kind::Float))
/// })?;
/// println!("{report}");
/// // The input and the output of GELU in bf16, and less.
/// assert!(report.bytes > 2 * 256 * 64 * 2);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn saved_tensors(
    vs: &VarStore,
    mut loss: impl FnMut() -> Result<Tensor>,
) -> Result<SavedReport> {
    capture::refuse("a report of iterations", "make it of iterations without a graph")?;
    let repeatable = Repeatable::new(vs)?;
    let mut beginning = repeatable.begin()?;
    let (recording, saved) = repeatable.rerun(&mut beginning)?.saved(&mut loss)?;
    Ok(SavedReport::new(&recording, &saved))
}

/// The part of the model and the operator that saved a tensor, and whether that was called in a region.
fn saver(recording: &Recording, saved: &SavedTensor) -> (String, String, bool) {
    let Some(event) = saved.event.filter(|event| *event < recording.events.len()) else {
        return ("start".to_owned(), "a custom function".to_owned(), false);
    };
    let outermost = recording.outermost(event).unwrap_or(event);
    let path = recording.part(event).unwrap_or_else(|| recording.unnamed_part(event));
    let called = &recording.events[outermost];
    let is_half = |kind| matches!(kind, Some(Kind::Half | Kind::BFloat16));
    (path, called.name.clone(), is_half(called.autocast))
}

/// A part of a storage: its first number, and how many it has.
type Part = (i64, i64);

/// What the forms of `SavedTensors` would keep instead of a tensor; `None` if the tensor itself.
fn copied(saved: &SavedTensor) -> [Option<u64>; 2] {
    let elements = saved.tensor.elements.unsigned_abs();
    let row = saved.tensor.sizes().last().map_or(1, |row| row.unsigned_abs().max(32));
    let fp8 = Some(elements + 4 * (elements / row));
    match saved.tensor.kind {
        _ if saved.is_small_part => [Some(saved.tensor.bytes().unsigned_abs()); 2],
        Some(Kind::Float) if saved.is_activation => [Some(2 * elements), fp8],
        Some(Kind::Half | Kind::BFloat16) if saved.is_activation => [None, fp8],
        _ => [None; 2],
    }
}

/// What the forms of `SavedTensors` would keep of a storage of which nodes save these parts.
fn smaller(parts: &HashMap<Part, &SavedTensor>) -> [u64; 2] {
    let (mut copies, mut whole) = ([0; 2], [0; 2]);
    for saved in parts.values() {
        for (form, copied) in copied(saved).into_iter().enumerate() {
            match copied {
                Some(bytes) => copies[form] += bytes,
                None => whole[form] = saved.storage_bytes,
            }
        }
    }
    [0, 1].map(|form| copies[form] + whole[form])
}

impl SavedReport {
    pub(super) fn new(recording: &Recording, saved: &[SavedTensor]) -> Self {
        // By storage: the index of the first tensor that was saved of it.
        let mut storages: HashMap<u64, (usize, u64, HashMap<Part, &SavedTensor>)> = HashMap::new();
        for (index, tensor) in saved.iter().enumerate().filter(|(_, tensor)| tensor.is_free) {
            let Some(memory) = tensor.tensor.memory else { continue };
            let (_, saves, parts) =
                storages.entry(memory).or_insert_with(|| (index, 0, HashMap::new()));
            *saves += 1;
            parts.insert((tensor.tensor.offset, tensor.tensor.elements), tensor);
        }
        let mut rows = BTreeMap::new();
        for (first, saves, parts) in storages.into_values() {
            let tensor = &saved[first];
            let (path, operator, in_region) = saver(recording, tensor);
            let what = match (tensor.is_weight, tensor.has_history) {
                (true, _) => What::Weight,
                (_, true) => What::Activation,
                _ => What::Other,
            };
            let dtype = Dtype::of(&tensor.tensor);
            let key = (path.clone(), operator.clone(), dtype, what, in_region);
            let row = rows.entry(key).or_insert_with(|| SavedRow {
                path,
                operator,
                dtype,
                what,
                in_region,
                tensors: 0,
                saves: 0,
                bytes: 0,
                half_bytes: 0,
                fp8_bytes: 0,
            });
            let [half, fp8] = smaller(&parts);
            row.tensors += 1;
            row.saves += saves;
            row.bytes += tensor.storage_bytes;
            row.half_bytes += half;
            row.fp8_bytes += fp8;
        }
        let mut rows: Vec<_> = rows.into_values().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
        let sum = |is: &dyn Fn(&SavedRow) -> bool| {
            rows.iter().filter(|row| is(row)).map(|row| row.bytes).sum()
        };
        Self {
            bytes: sum(&|_| true),
            weight_bytes: sum(&|row| row.what == What::Weight),
            f32_bytes: sum(&|row| row.dtype == Dtype::F32 && row.in_region),
            rows,
        }
    }

    /// The bytes that would be kept with [`SavedTensors::half`].
    pub fn half_bytes(&self) -> u64 {
        self.rows.iter().fold(0, |sum, row| sum.saturating_add(row.half_bytes))
    }

    /// The bytes that would be kept with [`SavedTensors::fp8_rows`].
    pub fn fp8_bytes(&self) -> u64 {
        self.rows.iter().fold(0, |sum, row| sum.saturating_add(row.fp8_bytes))
    }

    /// Returns advice in words: what takes many bytes, and how to keep fewer; the largest saving first. Empty if
    /// nothing stands out.
    pub fn advice(&self) -> Vec<String> {
        let share = |bytes: u64| bytes as f64 / self.bytes.max(1) as f64;
        let mut advice = Vec::new();
        let logits = self.rows.iter().filter(|row| LOGITS.contains(&row.operator.as_str()));
        let logits: u64 = logits.map(|row| row.bytes).sum();
        if share(logits) >= LARGE {
            let text = format!(
                "the logits are {} of what this iteration keeps: `lean::linear_cross_entropy` keeps them once, in the \
                 dtype of the product",
                percent(share(logits))
            );
            advice.push((logits, text));
        }
        let (half, fp8) = (self.bytes - self.half_bytes().min(self.bytes), self.fp8_bytes());
        if share(half) >= LARGE / 2.0 {
            let text = format!(
                "{} of what this iteration keeps is saved by `SavedTensors::half`, which keeps f32 activations in bf16",
                percent(share(half))
            );
            advice.push((half, text));
        }
        let fp8 = self.bytes - fp8.min(self.bytes);
        if share(fp8) >= 2.0 * LARGE {
            let text = format!(
                "{} of it is saved by `SavedTensors::fp8_rows`, with which the gradients of a GPT and a BERT were 2 to \
                 7 % off",
                percent(share(fp8))
            );
            advice.push((fp8, text));
        }
        if let Some((path, bytes)) = self.largest_part()
            && share(bytes) >= LARGE
            && share(logits) < LARGE
        {
            let text = format!(
                "{path} keeps {} of it: `recompute` keeps only its inputs, for a second run of it",
                percent(share(bytes))
            );
            advice.push((bytes, text));
        }
        advice.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        advice.into_iter().map(|(_, text)| text).collect()
    }

    /// The part of the model that keeps most activations.
    fn largest_part(&self) -> Option<(&str, u64)> {
        let mut parts: BTreeMap<&str, u64> = BTreeMap::new();
        for row in self.rows.iter().filter(|row| row.what == What::Activation) {
            *parts.entry(&row.path).or_default() += row.bytes;
        }
        parts.into_iter().max_by_key(|(_, bytes)| *bytes)
    }

    /// The lines above the table.
    pub(in crate::insight) fn summary(&self) -> String {
        let mut text = format!("kept for the backward pass: {}", mebibytes(self.bytes));
        if self.weight_bytes > 0 {
            text += &format!(", of which copies of weights {}", mebibytes(self.weight_bytes));
        }
        if self.f32_bytes > 0 {
            text += &format!(", f32 in regions {}", mebibytes(self.f32_bytes));
        }
        text + &format!(
            "\nin other forms: {} with SavedTensors::half, {} with SavedTensors::fp8_rows\n",
            mebibytes(self.half_bytes()),
            mebibytes(self.fp8_bytes())
        )
    }

    /// The table of the largest rows, and how many it leaves out.
    pub(in crate::insight) fn table(&self, most: usize) -> (Table<8>, usize) {
        let rows = self.rows.iter().take(most).map(|row| self.cells(row)).collect();
        (Table { columns: columns(), rows }, self.rows.len().saturating_sub(most))
    }

    fn cells(&self, row: &SavedRow) -> [String; 8] {
        let operator = row.operator.trim_start_matches("aten::");
        let dtype = match row.dtype == Dtype::F32 && row.in_region {
            true => format!("{} in a region", row.dtype),
            false => row.dtype.to_string(),
        };
        let share = 100.0 * row.bytes as f64 / self.bytes.max(1) as f64;
        [
            row.path.clone(),
            operator.to_owned(),
            row.what.to_string(),
            dtype,
            row.tensors.to_string(),
            row.saves.to_string(),
            mebibytes(row.bytes),
            format!("{share:.1}"),
        ]
    }
}

fn columns() -> [Column; 8] {
    [
        Column::new("part").left().width(28),
        Column::new("operator").left().width(22).gap(1),
        Column::new("what").left().width(10).gap(1),
        Column::new("dtype").left().width(16).gap(1),
        Column::new("tensors").width(7).gap(1),
        Column::new("saves").width(6).gap(1),
        Column::new("kept").width(11).gap(1),
        Column::new("%").width(5).gap(1),
    ]
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

impl Display for SavedReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary())?;
        let (table, rest) = self.table(MOST_ROWS);
        f.write_str(&table.plain())?;
        if rest > 0 {
            writeln!(f, "and {rest} more rows")?;
        }
        for line in self.advice() {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}
