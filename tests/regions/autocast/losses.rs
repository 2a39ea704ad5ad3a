//! Losses that programs write by hand, in half precision beside the same in f32, and the guide's page of them,
//! `docs/losses.md`.
//!
//! The test prints what it measures. To write that into the page:
//!
//! ```text
//! TCH_AMP_BLESS=1 cargo xtask simulate cargo test --test regions autocast::losses::
//! ```

use std::fmt::Write as _;
use std::fs;

use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::Autocast;
use tch_amp::autocast::LOG_PROBABILITIES;

use testkit::{devices, is_set, python};

const F32: Kind = Kind::Float;
const PAGE: &str = "docs/losses.md";

/// The largest error of a loss, or of its gradient, that the page calls safe.
const SAFE: f64 = 0.01;

/// Loss scales, so that no gradient is too small for fp16. As with a scaler, the largest at which all gradients are finite
/// is taken.
const SCALES: [f64; 5] = [256.0, 64.0, 16.0, 4.0, 1.0];

/// A loss of each sample, from the outputs of a network.
type Formula = fn(&[Tensor]) -> Tensor;

struct Loss {
    name: &'static str,
    /// What the page shows of the formula.
    written: &'static str,
    /// The outputs of a network, which are rounded to half precision.
    outputs: fn() -> Vec<Tensor>,
    by_hand: Formula,
    /// What the page recommends, and the formula.
    instead: Option<(&'static str, Formula)>,
}

/// Numbers between -1 and 1 that are no random numbers of a device.
fn wave(size: &[i64], step: f64) -> Tensor {
    let count: i64 = size.iter().product();
    ((Tensor::arange(count, (Kind::Double, Device::Cpu)) + 1.0) * step).sin().reshape(size)
}

/// The same as a constant of a loss, such as a target.
fn constant(like: &Tensor, size: &[i64], step: f64) -> Tensor {
    wave(size, step).to_kind(F32).to_device(like.device())
}

/// Targets of 0 and 1.
fn labels(like: &Tensor) -> Tensor {
    constant(like, &like.size(), 0.9).gt(0.0).to_kind(F32)
}

/// The class that each row belongs to: the one with the largest output.
fn classes(logits: &Tensor) -> Tensor {
    logits.detach().argmax(-1, true)
}

fn sum(x: &Tensor) -> Tensor {
    x.sum_dim_intlist(-1, false, None::<Kind>)
}

/// What the logarithm of the density of a Gaussian subtracts: the logarithm of the square root of 2π.
fn half_log_2_pi() -> f64 {
    0.5 * std::f64::consts::TAU.ln()
}

fn squashed_gaussian(out: &[Tensor], correction: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let (mean, log_std) = (&out[0], &out[1]);
    let noise = constant(mean, &mean.size(), 0.37).to_kind(mean.kind());
    let x = mean + log_std.exp() * &noise;
    let density = noise.square() * -0.5 - log_std - half_log_2_pi();
    sum(&(density - correction(&x)))
}

fn mixture(out: &[Tensor], shares: &Tensor) -> Tensor {
    let (mean, log_std) = (&out[1], &out[2]);
    let y = constant(mean, &[32, 1], 0.71) * 2.0;
    let z = (y - mean) / log_std.exp();
    shares + z.square() * -0.5 - log_std - half_log_2_pi()
}

fn ratio(out: &[Tensor], kind: Option<Kind>) -> Tensor {
    let action = (constant(&out[0], &[32, 1], 1.7) * 4.99 + 5.0).to_kind(Kind::Int64);
    let log = |x: &Tensor| x.log_softmax(-1, kind).gather(-1, &action, false);
    (log(&out[0]) - log(&out[1].detach())).exp()
}

fn distillation(out: &[Tensor], kind: Option<Kind>) -> Tensor {
    let [r, q] = [&out[0], &out[1]].map(|x| x.log_softmax(-1, kind));
    sum(&(q.exp() * (&q - r)))
}

fn logits() -> Vec<Tensor> {
    vec![wave(&[32, 10], 0.83) * 9.0]
}

fn binary_logits() -> Vec<Tensor> {
    vec![wave(&[32, 4], 0.83) * 7.0]
}

fn pair(closeness: f64) -> Vec<Tensor> {
    let a = wave(&[32, 64], 0.83);
    let b = &a + wave(&[32, 64], 0.59) * closeness;
    vec![a, b]
}

fn distance(a: &Tensor, b: &Tensor) -> Tensor {
    (sum(&(a - b).square()) + 1e-8).sqrt()
}

/// The losses of the page, in its order.
const LOSSES: &[Loss] = &[
    Loss {
        name: "soft actor-critic: log-probability of a tanh-squashed Gaussian",
        written: "`log N(x) - (1 - tanh(x)² + 1e-6).log()`",
        outputs: || vec![wave(&[32, 4], 0.83) * 3.5, wave(&[32, 4], 0.47) - 1.0],
        by_hand: |out| squashed_gaussian(out, |x| (1i64 - x.tanh().square() + 1e-6).log()),
        instead: Some(("`2 (ln 2 - x - softplus(-2 x))` in place of the logarithm", |out| {
            squashed_gaussian(out, |x| (x + (x * -2.0).softplus()) * -2.0 + 2.0 * 2f64.ln())
        })),
    },
    Loss {
        name: "log(1 - p), as of unlikelihood losses",
        written: "`-(1 - x.sigmoid() + 1e-6).log()`",
        outputs: binary_logits,
        by_hand: |out| sum(&-(1i64 - out[0].sigmoid() + 1e-6).log()),
        instead: Some(("`-(-x).log_sigmoid()`", |out| sum(&-(-&out[0]).log_sigmoid()))),
    },
    Loss {
        name: "binary cross-entropy of probabilities",
        written: "`-(t p.log() + (1 - t) (1 - p).log())`",
        outputs: binary_logits,
        by_hand: |out| {
            let (p, t) = (out[0].sigmoid(), labels(&out[0]));
            sum(&-(&t * (&p + 1e-6).log() + (1i64 - &t) * (1i64 - p + 1e-6).log()))
        },
        instead: Some(("`binary_cross_entropy_with_logits`", |out| {
            let weight = None::<Tensor>;
            let none = Reduction::None;
            let t = labels(&out[0]);
            sum(&out[0].binary_cross_entropy_with_logits(
                &t,
                weight.as_ref(),
                weight.as_ref(),
                none,
            ))
        })),
    },
    Loss {
        name: "focal loss",
        written: "`-(1 - q)² q.log()` with `q = t p + (1 - t) (1 - p)`",
        outputs: binary_logits,
        by_hand: |out| {
            let (p, t) = (out[0].sigmoid(), labels(&out[0]));
            let q = &t * &p + (1i64 - &t) * (1i64 - &p);
            sum(&-((1i64 - &q).square() * (q + 1e-6).log()))
        },
        instead: Some(("`z = (2 t - 1) x`; `-(-z).sigmoid()² z.log_sigmoid()`", |out| {
            let z = (labels(&out[0]) * 2.0 - 1.0) * &out[0];
            sum(&-((-&z).sigmoid().square() * z.log_sigmoid()))
        })),
    },
    Loss {
        name: "dice loss of masks of 256 x 256",
        written: "`1 - (2 (p t).sum() + 1) / (p.sum() + t.sum() + 1)`",
        outputs: || vec![(wave(&[2, 65536], 0.9) + 0.05) * 9.0],
        by_hand: |out| {
            let (p, t) = (out[0].sigmoid(), labels(&out[0]));
            1i64 - (sum(&(&p * &t)) * 2.0 + 1.0) / (sum(&p) + sum(&t) + 1.0)
        },
        instead: None,
    },
    Loss {
        name: "negative log-likelihood with label smoothing",
        written: "`-(0.9 q[class] + 0.1 q.mean())` with `q = x.log_softmax()`",
        outputs: logits,
        by_hand: |out| {
            let q = out[0].log_softmax(-1, None::<Kind>);
            let own = q.gather(-1, &classes(&out[0]), false).squeeze_dim(-1);
            -(own * 0.9 + sum(&q) * 0.01)
        },
        instead: Some(("`cross_entropy_loss`, whose last argument is the smoothing", |out| {
            let classes = classes(&out[0]).squeeze_dim(-1);
            out[0].cross_entropy_loss(&classes, None::<Tensor>, Reduction::None, -100, 0.1)
        })),
    },
    Loss {
        name: "entropy bonus of a policy",
        written: "`-(p p.log()).sum()` with `p = x.softmax()`",
        outputs: logits,
        by_hand: |out| {
            let p = out[0].softmax(-1, None::<Kind>);
            sum(&-(&p * (&p + 1e-6).log()))
        },
        instead: Some(("`q = x.log_softmax(-1, Kind::Float)`; `-(q.exp() q).sum()`", |out| {
            let q = out[0].log_softmax(-1, F32);
            sum(&-(q.exp() * q))
        })),
    },
    Loss {
        name: "log-sum-exp",
        written: "`x.exp().sum().log()`",
        outputs: || vec![wave(&[32, 10], 0.83) * 13.0],
        by_hand: |out| sum(&out[0].exp()).log(),
        instead: Some(("`x.to_kind(Kind::Float).logsumexp(-1, false)`", |out| {
            out[0].to_kind(F32).logsumexp(-1, false)
        })),
    },
    Loss {
        name: "ratio of probabilities, as in PPO",
        written: "`(q - old).exp()` with `q = x.log_softmax()[action]`",
        outputs: || {
            let old = wave(&[32, 10], 0.83) * 6.0;
            vec![&old + wave(&[32, 10], 0.59) * 0.1, old]
        },
        by_hand: |out| ratio(out, None),
        instead: Some(("`log_softmax(-1, Kind::Float)`", |out| ratio(out, Some(F32)))),
    },
    Loss {
        name: "KL divergence of two classifiers, as of distillation",
        written: "`(q.exp() (q - r)).sum()` with two `log_softmax`",
        outputs: || {
            let teacher = wave(&[32, 10], 0.83) * 3.0;
            vec![&teacher + wave(&[32, 10], 0.59) * 0.3, teacher]
        },
        by_hand: |out| distillation(out, None),
        instead: Some(("`log_softmax(-1, Kind::Float)`", |out| distillation(out, Some(F32)))),
    },
    Loss {
        name: "KL divergence of a variational autoencoder",
        written: "`-0.5 (1 + v - mean² - v.exp()).sum()`",
        outputs: || vec![wave(&[32, 16], 0.83) * 0.05, wave(&[32, 16], 0.59) * 0.05],
        by_hand: |out| {
            let (mean, log_variance) = (&out[0], &out[1]);
            sum(&(1i64 + log_variance - mean.square() - log_variance.exp())) * -0.5
        },
        instead: None,
    },
    Loss {
        name: "mixture density of 5 Gaussians",
        written: "`-(w.softmax() exp(log N)).sum().log()`",
        outputs: || {
            vec![wave(&[32, 5], 0.83) * 3.0, wave(&[32, 5], 0.59) * 2.0, wave(&[32, 5], 0.47) - 1.5]
        },
        by_hand: |out| {
            let shares = out[0].softmax(-1, None::<Kind>).log();
            -sum(&mixture(out, &shares).exp()).log()
        },
        instead: Some(("`-logsumexp(w.log_softmax(-1, Kind::Float) + log N)`", |out| {
            -mixture(out, &out[0].log_softmax(-1, F32)).logsumexp(-1, false)
        })),
    },
    Loss {
        name: "cosine similarity of similar vectors",
        written: "`1 - (a b).sum() / (norm(a) norm(b))` with `a.square().sum().sqrt()`",
        outputs: || pair(0.2),
        by_hand: |out| {
            let norm = |x: &Tensor| sum(&x.square()).sqrt();
            1i64 - sum(&(&out[0] * &out[1])) / (norm(&out[0]) * norm(&out[1]))
        },
        instead: None,
    },
    Loss {
        name: "InfoNCE",
        written: "`cross_entropy(a.matmul(b.T) / 0.05)` of normalized vectors",
        outputs: || pair(1.0),
        by_hand: |out| {
            let unit = |x: &Tensor| x / sum(&x.square()).sqrt().unsqueeze(-1);
            let logits = unit(&out[0]).matmul(&unit(&out[1]).tr()) / 0.05;
            let own = Tensor::arange(32, (Kind::Int64, logits.device()));
            logits.cross_entropy_loss(&own, None::<Tensor>, Reduction::None, -100, 0.0)
        },
        instead: None,
    },
    Loss {
        name: "triplet loss by pairwise distances",
        written: "`(norm(a - p) - norm(a - n) + 0.5).relu()`",
        outputs: || {
            let mut all = pair(1.0);
            all.push(&all[0] + wave(&[32, 64], 0.61));
            all
        },
        by_hand: |out| (distance(&out[0], &out[1]) - distance(&out[0], &out[2]) + 0.5).relu(),
        instead: Some(("`triplet_margin_loss`", |out| {
            let [a, p, n] = [&out[0], &out[1], &out[2]];
            Tensor::triplet_margin_loss(a, p, n, 0.5, 2.0, 1e-8, false, Reduction::None)
        })),
    },
];

/// The errors of a loss and of its gradient, relative to their sizes: of all samples together, so that errors of
/// different signs do not cancel.
#[derive(Clone, Copy, Debug)]
struct Errors {
    loss: f64,
    gradient: f64,
}

impl Errors {
    fn are_safe(self) -> bool {
        self.loss <= SAFE && self.gradient <= SAFE
    }

    fn or_worse(self, other: Self) -> Self {
        let worse = |a: f64, b: f64| if a >= b || a.is_nan() { a } else { b };
        Self { loss: worse(self.loss, other.loss), gradient: worse(self.gradient, other.gradient) }
    }

    /// What the page says: both errors, in bold if they are not safe.
    fn shown(self) -> String {
        let bold = if self.are_safe() { "" } else { "**" };
        format!("{bold}{} / {}{bold}", percent(self.loss), percent(self.gradient))
    }
}

fn percent(error: f64) -> String {
    match 100.0 * error {
        error if !error.is_finite() => "not finite".to_owned(),
        error if error >= 10.0 => format!("{error:.0} %"),
        error if error >= 0.995 => format!("{error:.1} %"),
        error if error >= 0.005 => format!("{error:.2} %"),
        _ => "< 0.01 %".to_owned(),
    }
}

/// The losses of all samples and the gradients of the outputs, with a loss scale.
fn computed(outputs: &[Tensor], scale: f64, loss: impl FnOnce(&[Tensor]) -> Tensor) -> [Tensor; 2] {
    let leaves: Vec<_> =
        outputs.iter().map(|x| x.detach().copy().set_requires_grad(true)).collect();
    let losses = loss(&leaves);
    (losses.to_kind(F32).sum(F32) * scale).backward();
    let gradients = leaves.iter().map(Tensor::grad).filter(Tensor::defined);
    let flat: Vec<_> = gradients.map(|g| g.to_kind(Kind::Double).reshape([-1]) / scale).collect();
    [losses.detach().to_kind(Kind::Double).reshape([-1]), Tensor::cat(&flat, 0)]
}

fn errors(loss: &Loss, formula: Formula, region: Autocast, device: Device, kind: Kind) -> Errors {
    let outputs: Vec<_> =
        (loss.outputs)().iter().map(|x| x.to_kind(kind).to_device(device)).collect();
    let wide: Vec<_> = outputs.iter().map(|x| x.to_kind(F32)).collect();
    let exact = computed(&wide, 1.0, loss.by_hand);
    let at =
        |scale| computed(&outputs, scale, |out| region.dtype(kind).run(|| formula(out)).unwrap());
    let is_finite = |found: &[Tensor; 2]| found[1].isfinite().all().int64_value(&[]) == 1;
    let found = SCALES.iter().map(|scale| at(*scale)).find(is_finite).unwrap_or_else(|| at(1.0));
    let relative = |i: usize| ((&found[i] - &exact[i]).norm() / exact[i].norm()).double_value(&[]);
    Errors { loss: relative(0), gradient: relative(1) }
}

const KINDS: [Kind; 2] = [Kind::BFloat16, Kind::Half];

/// The CPU and, where there is one, a GPU.
fn places() -> Vec<Device> {
    devices().into_iter().take(2).collect()
}

/// The cells of a row: by hand in a plain region, on each device in bf16 and fp16, then the worst of all of these with
/// `LOG_PROBABILITIES`, and of what is recommended instead.
fn measured(loss: &Loss) -> Vec<Option<Errors>> {
    let each = |formula: Formula, keep: bool| -> Vec<Errors> {
        let of = |device, kind| {
            let plain = Autocast::new(device);
            let region = if keep { plain.keep_in_f32(LOG_PROBABILITIES) } else { plain };
            errors(loss, formula, region, device, kind)
        };
        places().into_iter().flat_map(|device| KINDS.map(|kind| of(device, kind))).collect()
    };
    let worst = |all: Vec<Errors>| all.into_iter().reduce(Errors::or_worse);
    let mut cells: Vec<_> = each(loss.by_hand, false).into_iter().map(Some).collect();
    cells.resize(4, None);
    cells.push(worst(each(loss.by_hand, true)));
    cells.push(loss.instead.and_then(|(_, formula)| worst(each(formula, false))));
    cells
}

/// The two tables of the page: the errors, and what to write instead.
fn tables() -> [String; 2] {
    let mut errors =
        "| loss | CPU, bf16 | CPU, fp16 | CUDA, bf16 | CUDA, fp16 | kept | instead |\n".to_owned();
    let mut instead = "| loss | instead |\n|---|---|\n".to_owned();
    errors.push_str("|---|---|---|---|---|---|---|\n");
    for loss in LOSSES {
        let cells = measured(loss).into_iter();
        let shown = cells.map(|cell| cell.map_or_else(|| "-".to_owned(), Errors::shown));
        let shown: Vec<_> = shown.collect();
        writeln!(errors, "| {}: {} | {} |", loss.name, loss.written, shown.join(" | ")).unwrap();
        if let Some((form, _)) = loss.instead {
            writeln!(instead, "| {} | {form} |", loss.name).unwrap();
        }
    }
    [errors, instead]
}

/// Where the page has a table: its first byte, and the first one behind it.
fn between(page: &str, mark: &str) -> (usize, usize) {
    let begin = format!("<!-- generated: {mark} -->\n\n");
    let from = page.find(&begin).unwrap_or_else(|| panic!("{PAGE} has no {mark}")) + begin.len();
    (from, from + page[from..].find("\n<!-- end -->").unwrap())
}

const MARKS: [&str; 2] = ["errors", "instead"];

/// The errors that a cell of the page shows, and whether they are bold.
fn read(cell: &str) -> Option<([f64; 2], bool)> {
    let number = |text: &str| match text.trim_start_matches("< ").strip_suffix(" %") {
        Some(number) => number.parse::<f64>().unwrap() / 100.0,
        None => f64::INFINITY,
    };
    let (loss, gradient) = cell.trim_matches('*').split_once(" / ")?;
    Some(([number(loss), number(gradient)], cell.starts_with("**")))
}

/// The numbers of another CPU differ a little: half and twice as much are the same here.
fn is_like(shown: f64, found: f64) -> bool {
    let [shown, found] =
        [shown, found].map(|error| if error.is_finite() { error.max(1e-3) } else { 1e9 });
    (0.5..=2.0).contains(&(shown / found))
}

/// Without a GPU its columns are not compared, and of the columns with the largest error of all devices only the CPU's
/// part.
#[test]
fn the_page_has_the_errors_and_says_what_is_safe() {
    let path = python::root().join(PAGE);
    let mut page = fs::read_to_string(&path).unwrap();
    let tables = tables();
    println!("{}", tables[0]);
    if is_set("TCH_AMP_BLESS") {
        assert!(places().len() > 1, "the page needs the columns of a GPU");
        for (mark, table) in MARKS.iter().zip(&tables) {
            let (from, to) = between(&page, mark);
            page.replace_range(from..to, table);
        }
        fs::write(path, page).unwrap();
        return;
    }
    let [shown, instead] = MARKS.map(|mark| {
        let (from, to) = between(&page, mark);
        &page[from..to]
    });
    assert_eq!(instead.trim(), tables[1].trim(), "{PAGE}");
    let rows = |table: &str| -> Vec<Vec<String>> {
        let cells =
            |row: &str| row.trim_matches('|').split('|').map(|c| c.trim().to_owned()).collect();
        table.trim().lines().skip(2).map(cells).collect()
    };
    let (shown, found) = (rows(shown), rows(&tables[0]));
    assert_eq!(shown.len(), found.len(), "{PAGE}");
    for (shown, found) in shown.iter().zip(&found) {
        assert_eq!(shown[0], found[0], "{PAGE}");
        let name = &found[0];
        for (column, (shown, found)) in shown.iter().zip(found).enumerate().skip(1) {
            let (Some((shown_errors, shown_bold)), Some((errors, bold))) =
                (read(shown), read(found))
            else {
                continue;
            };
            let what = format!("{name}, column {column}: {PAGE} says {shown}, and it is {found}");
            if places().len() == 1 && column > 4 {
                assert!(shown_bold || !bold, "{what}");
                continue;
            }
            assert_eq!(shown_bold, bold, "{what}");
            let is_alike =
                shown_errors.iter().zip(errors).all(|(shown, found)| is_like(*shown, found));
            assert!(is_alike, "{what}");
        }
    }
}
