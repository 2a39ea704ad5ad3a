//! What an iteration keeps for its backward pass: the bytes beside those that are freed, and the rows of a small model.

use recipes::gpt::model::{Config, Gpt};
use recipes::images::model as images;
use recipes::ranks::Ranks;
use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Page, SavedReport, audit, named, saved_tensors};
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};
use tch_amp::memory::{SavedTensors, peak_during};
use tch_amp::recompute::Recomputed;
use tch_amp::{Autocast, GradScaler, Result, autocast};

use crate::insight::alone;
use testkit::bits::bits;
use testkit::tensors::variables;

/// The bytes that are freed when the graph of a loss is dropped. The loss itself stays.
fn freed(loss: impl Fn() -> Result<Tensor>) -> u64 {
    // Nothing writes to it, so that it takes no memory.
    const LARGE: i64 = 1 << 33;
    let peak = |with_graph: bool| {
        let run = || {
            let loss = loss().unwrap();
            let kept = if with_graph { loss } else { without_graph(loss) };
            drop(Tensor::empty([LARGE], (Kind::Uint8, Device::Cpu)));
            drop(kept);
        };
        peak_during(run).unwrap().1
    };
    peak(true) - peak(false)
}

fn without_graph(loss: Tensor) -> Tensor {
    loss.detach().copy()
}

/// Compares a report with what is freed.
fn assert_listed(vs: &VarStore, loss: impl Fn() -> Result<Tensor>) -> SavedReport {
    // The first run may make what stays, such as kernels' buffers.
    drop(loss().unwrap());
    let report = saved_tensors(vs, &loss).unwrap();
    let freed = freed(&loss);
    let apart = (report.bytes as f64 - freed as f64).abs();
    assert!(
        apart <= 0.01 * freed as f64,
        "{} bytes, and {freed} are freed\n{report}",
        report.bytes
    );
    report
}

fn tokens(rows: i64, length: i64) -> (Tensor, Tensor) {
    let all = Tensor::arange(rows * (length + 1), (Kind::Int64, Device::Cpu)) * 7;
    let all = all.remainder(251).view([rows, length + 1]);
    (all.narrow(1, 0, length), all.narrow(1, 1, length).contiguous())
}

const GPT: Config = Config {
    vocabulary: 256,
    width: 64,
    layers: 2,
    heads: 2,
    length: 64,
    dropout: 0.0,
    recompute: false,
    lean: false,
};

#[test]
fn the_bytes_are_those_that_are_freed_for_the_models_of_the_recipes() {
    let _alone = alone();
    let (xs, ys) = tokens(8, 64);
    let lean = Config { lean: true, ..GPT };
    let dropped = Config { dropout: 0.1, ..GPT };
    for config in [GPT, lean, dropped, Config { recompute: true, ..GPT }] {
        tch::manual_seed(1);
        let vs = VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), config);
        let report = assert_listed(&vs, || autocast(Device::Cpu, || model.loss(&xs, &ys, true))?);
        println!("{config:?}\n{report}");
        assert_listed(&vs, || model.loss(&xs, &ys, true));
    }
    let vs = VarStore::new(Device::Cpu);
    let config = images::Config { width: 8, stages: 2, blocks: 1, classes: 10, synced: false };
    let net = images::Net::new(&vs.root(), config, &Ranks::alone());
    let xs = Tensor::randn([16, 1, 28, 28], (Kind::Float, Device::Cpu));
    let ys = Tensor::arange(16, (Kind::Int64, Device::Cpu)).remainder(10);
    let loss = || net.logits(&xs, true).cross_entropy_for_logits(&ys);
    println!("{}", assert_listed(&vs, || autocast(Device::Cpu, loss)));
}

/// A model with a GELU between two layers, and a head.
struct Model {
    vs: VarStore,
    up: nn::Linear,
    down: nn::Linear,
    head: nn::Linear,
    xs: Tensor,
    ys: Tensor,
}

impl Model {
    fn new(classes: i64) -> Self {
        tch::manual_seed(2);
        let vs = VarStore::new(Device::Cpu);
        let linear =
            |name: &str, from, to| nn::linear(vs.root() / name, from, to, Default::default());
        let (up, down, head) =
            (linear("up", 64, 256), linear("down", 256, 64), linear("head", 64, classes));
        let xs = Tensor::randn([128, 64], (Kind::Float, Device::Cpu));
        let ys = Tensor::arange(128, (Kind::Int64, Device::Cpu)).remainder(classes);
        Self { vs, up, down, head, xs, ys }
    }

    fn hidden(&self) -> Tensor {
        let hidden = named("activation", || self.up.forward(&self.xs).gelu("none"));
        self.down.forward(&hidden)
    }

    fn loss(&self) -> Tensor {
        let logits = self.head.forward(&self.hidden()).to_kind(Kind::Float);
        logits.cross_entropy_for_logits(&self.ys)
    }
}

fn rows(report: &SavedReport) -> Vec<serde_json::Value> {
    testkit::rows::rows(report, "rows")
}

#[test]
fn rows_name_the_part_the_operator_and_the_form() {
    let _alone = alone();
    let model = Model::new(10);
    let report = assert_listed(&model.vs, || autocast(Device::Cpu, || model.loss()));
    let find = |operator: &str, what: &str| {
        let all = rows(&report);
        let row = all.iter().find(|row| row["operator"] == operator && row["what"] == what);
        row.unwrap_or_else(|| panic!("{operator} {what}: {report}")).clone()
    };
    // The input of the activation, in bf16, and its output, which the next layer saves.
    let gelu = find("aten::gelu", "Activation");
    assert_eq!(gelu["path"], "activation");
    assert_eq!((&gelu["dtype"], &gelu["bytes"]), (&"bf16".into(), &(128 * 256 * 2).into()));
    assert_eq!(gelu["in_region"], true);
    let all = rows(&report);
    let down = all.iter().find(|row| row["path"] == "down" && row["what"] == "Activation").unwrap();
    assert_eq!(
        (&down["operator"], &down["bytes"]),
        (&"aten::linear".into(), &(128 * 256 * 2).into())
    );
    // The casts of the weights, but for that of the first, whose input needs no gradient.
    let weights: u64 = (256 * 64 + 64 * 10) * 2;
    assert_eq!(report.weight_bytes, weights, "{report}");
    // The logits, f32 by the program.
    assert!(report.f32_bytes >= 128 * 10 * 4, "{report}");
    assert_eq!(report.half_bytes(), report.bytes, "the logits are small: {report}");
    assert!(report.fp8_bytes() < report.bytes - 2 * 128 * 256 + 2048);
    let restored: SavedReport =
        serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(restored, report);
}

/// The bytes that are said to be kept in other forms are those that are freed in them.
#[test]
fn other_forms_keep_what_the_report_says() {
    let _alone = alone();
    let model = Model::new(100);
    assert_forms(&model.vs, || autocast(Device::Cpu, || model.loss()));
    let vs = VarStore::new(Device::Cpu);
    let gpt = Gpt::new(&vs.root(), GPT);
    let (xs, ys) = tokens(8, 64);
    // Queries, keys and values are parts of one memory.
    assert_forms(&vs, || autocast(Device::Cpu, || gpt.loss(&xs, &ys, true))?);
}

/// Autograd keeps all of an activation of which a small part is saved; the forms keep the part.
#[test]
fn small_parts_are_listed_as_they_are_kept() {
    let _alone = alone();
    let model = Model::new(10);
    let part = |hidden: &Tensor| hidden.narrow(0, 0, 8).sin().sum(Kind::Float);
    assert_forms(&model.vs, || autocast(Device::Cpu, || part(&model.hidden())));
    let both = || {
        let hidden = model.hidden();
        part(&hidden) + hidden.cos().sum(Kind::Float)
    };
    assert_forms(&model.vs, || autocast(Device::Cpu, both));
    assert_forms(&model.vs, || Ok(both()));
}

fn assert_forms(vs: &VarStore, loss: impl Fn() -> Result<Tensor>) {
    let report = assert_listed(vs, &loss);
    for (form, said) in [
        (SavedTensors::half(), report.half_bytes()),
        (SavedTensors::fp8_rows(), report.fp8_bytes()),
        (SavedTensors::on_host(), report.bytes),
    ] {
        let freed = freed(|| form.try_run(&loss));
        let apart = (said as f64 - freed as f64).abs();
        assert!(apart <= 0.01 * freed as f64, "{form:?}: {said} said, {freed} freed\n{report}");
    }
}

#[test]
fn large_logits_are_named_with_what_keeps_them_once() {
    let _alone = alone();
    let model = Model::new(2000);
    let region = Autocast::new(Device::Cpu);
    let report = assert_listed(&model.vs, || region.run(|| model.loss()));
    let advice = report.advice();
    assert!(advice[0].starts_with("the logits are "), "{report}");
    assert!(advice[0].contains("`lean::linear_cross_entropy`"), "{report}");
    let audit =
        audit(&model.vs, &region, &GradScaler::disabled(), |region| region.run(|| model.loss()));
    let audit = audit.unwrap().to_string();
    assert!(audit.contains(&format!("memory: {}", advice[0])), "{audit}");
    // With it they are kept in bf16, and not named any more.
    let config = LinearCrossEntropyConfig::default();
    let lean = assert_listed(&model.vs, || {
        region.run(|| {
            let head = &model.head;
            linear_cross_entropy(&model.hidden(), &head.ws, head.bs.as_ref(), &model.ys, &config)
        })?
    });
    // Each of 128 x 2000 logits takes two bytes less.
    assert!(lean.bytes + 2 * 128 * 2000 <= report.bytes + 4096, "{lean}\n{report}");
    assert!(rows(&lean).iter().any(|row| row["operator"] == "linear_cross_entropy"), "{lean}");
    assert!(!lean.to_string().contains("the logits are"), "{lean}");
}

#[test]
fn a_part_that_keeps_most_is_named_with_recomputation() {
    let _alone = alone();
    let model = |recomputed: bool| {
        tch::manual_seed(4);
        let vs = VarStore::new(Device::Cpu);
        let linear = nn::linear(vs.root() / "wide", 64, 2048, Default::default());
        let block = nn::seq().add(linear).add_fn(|xs| xs.sin().tanh().sigmoid());
        let block: Box<dyn Module> =
            if recomputed { Box::new(Recomputed::new(block)) } else { Box::new(block) };
        (vs, block)
    };
    let xs = Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
    let report = |recomputed| {
        let (vs, block) = model(recomputed);
        let loss = || autocast(Device::Cpu, || block.forward(&xs).mean(Kind::Float));
        // The second has the state of the random number generator, too, which is no tensor of a layer.
        if recomputed { saved_tensors(&vs, loss).unwrap() } else { assert_listed(&vs, loss) }
    };
    let (all, inputs) = (report(false), report(true));
    assert!(all.advice().iter().any(|line| line.contains("`recompute`")), "{all}");
    assert!(inputs.bytes < all.bytes / 2, "{inputs}");
}

#[test]
fn training_goes_on_as_without_a_report() {
    let _alone = alone();
    let train = |reports: bool| {
        tch::manual_seed(5);
        let vs = VarStore::new(Device::Cpu);
        let net = nn::seq_t()
            .add(nn::linear(vs.root() / "in", 16, 256, Default::default()))
            .add(nn::batch_norm1d(vs.root() / "norm", 256, Default::default()))
            .add_fn_t(|xs, train| xs.dropout(0.3, train));
        let xs = Tensor::randn([64, 16], (Kind::Float, Device::Cpu));
        let loss = || autocast(Device::Cpu, || net.forward_t(&xs, true).square().mean(Kind::Float));
        loss().unwrap().backward();
        if reports {
            drop(saved_tensors(&vs, loss).unwrap());
        }
        loss().unwrap().backward();
        let all = variables(&vs);
        let gradients = all.values().filter(|w| w.requires_grad()).map(|w| bits(&w.grad()));
        all.values().map(bits).chain(gradients).collect::<Vec<_>>()
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn a_page_has_the_table_and_the_advice() {
    let _alone = alone();
    let model = Model::new(2000);
    let report = saved_tensors(&model.vs, || autocast(Device::Cpu, || model.loss())).unwrap();
    let mut page = Page::new("kept");
    page.saved.push(report.clone());
    let (html, text) = (page.to_html(), page.to_string());
    for part in ["Kept for the backward pass", "the logits are", "activation"] {
        assert!(html.contains(part), "{part}");
    }
    assert!(text.contains(report.to_string().trim_end()), "{text}");
    // A page of an earlier version has none.
    let mut written = serde_json::to_value(&page).unwrap();
    written.as_object_mut().unwrap().remove("saved");
    let read: Page = serde_json::from_value(written).unwrap();
    assert!(read.saved.is_empty());
}

#[test]
fn an_error_of_the_loss_is_returned() {
    let _alone = alone();
    let model = Model::new(10);
    let failed = saved_tensors(&model.vs, || Err(tch_amp::Error::Torch("of the loss".to_owned())));
    testkit::assert_says(failed, "of the loss");
}
