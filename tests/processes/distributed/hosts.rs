//! Ranks on two hosts: network namespaces that a pair of virtual interfaces joins. This takes root, and `ip`.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::distributed::{DistributedDataParallel, GroupConfig, ProcessGroup, Store};
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{GradScaler, Result};

use super::ranks;
use super::system::Running;
use testkit::bits::hex;
use testkit::files::Folder;
use testkit::programs::this_test_by;
use testkit::skipped;

/// The rank of a process, and the file of its checkpoint.
const FILE: &str = "TCH_AMP_TEST_HOSTS";
const INTERFACE: &str = "amp0";
const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];
const PORTS: [u16; 2] = [29_611, 29_612];
const TIMEOUT: Duration = Duration::from_secs(4);
const STEPS: usize = 10;

struct Training {
    net: nn::Linear,
    vs: VarStore,
    ddp: DistributedDataParallel,
    opt: Optimizer,
    scaler: GradScaler,
    rank: usize,
}

impl Training {
    fn new(group: &ProcessGroup, saved: Option<&Checkpoint>) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        let config = nn::LinearConfig { ws_init: nn::Init::Const(0.25), ..Default::default() };
        let net = nn::linear(vs.root(), 6, 3, nn::LinearConfig { bias: false, ..config });
        let mut opt = Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.05)?;
        let mut scaler =
            GradScalerConfig { growth_interval: 3, ..Default::default() }.build(Device::Cpu)?;
        if let Some(saved) = saved {
            let restore = saved.restore().add("model", &vs);
            restore.add("optimizer", &mut opt).add("scaler", &mut scaler).apply()?;
        }
        let ddp = DistributedDataParallel::new(group, &vs)?;
        Ok(Self { net, vs, ddp, opt, scaler, rank: group.rank() })
    }

    fn step(&mut self, step: usize) -> Result<()> {
        let seed = (step * 2 + self.rank) as f64;
        let xs = (Tensor::arange(24, (Kind::Float, Device::Cpu)) + seed).sin().view([4, 6]);
        self.opt.zero_grad()?;
        let loss = self.ddp.forward(|| self.net.forward(&xs).square().mean(Kind::Float))?;
        self.ddp.backward_scaled(&mut self.scaler, &loss)?;
        drop(self.scaler.step(&mut self.opt)?);
        self.scaler.update()
    }

    fn save(&mut self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &self.vs)?;
        checkpoint.add("optimizer", &mut self.opt)?;
        checkpoint.add("scaler", &mut self.scaler)?;
        group.on_rank_0(|| checkpoint.save(path)).map(drop)
    }
}

/// A network namespace for each host. Removed in the end.
struct Hosts([String; 2]);

fn ip(arguments: &str) -> bool {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}

impl Hosts {
    /// Joins two hosts, or returns `None` where that is not allowed.
    fn join() -> Option<Self> {
        let number = std::process::id();
        let hosts = Self([format!("tamp-{number}-a"), format!("tamp-{number}-b")]);
        let [a, b] = &hosts.0;
        let made = ip(&format!("netns add {a}")) && ip(&format!("netns add {b}"));
        let joined =
            format!("link add {INTERFACE} netns {a} type veth peer name {INTERFACE} netns {b}");
        let set_up = |host: &String, address| {
            ip(&format!("-n {host} address add {address}/24 dev {INTERFACE}"))
                && ip(&format!("-n {host} link set lo up"))
                && ip(&format!("-n {host} link set {INTERFACE} up"))
        };
        let both = || hosts.0.iter().zip(ADDRESSES).all(|(host, address)| set_up(host, address));
        (made && ip(&joined) && both()).then_some(hosts)
    }

    fn set_link(&self, state: &str) {
        assert!(ip(&format!("-n {} link set {INTERFACE} {state}", self.0[1])));
    }

    fn start(&self, rank: usize, file: &Path) -> Running {
        let words = ["ip", "netns", "exec", &self.0[rank]];
        let mut command = this_test_by(&words, "distributed::hosts::rank");
        command.env(FILE, file).env("RANK", rank.to_string()).stdin(Stdio::piped());
        Running::start(&mut command)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.0 {
            ip(&format!("netns delete {host}"));
        }
    }
}

/// Lets a rank go on that waits.
fn let_go_on(rank: &mut Running) {
    writeln!(rank.child.stdin.as_mut().unwrap(), "go on").unwrap();
}

fn group(rank: usize, port: u16) -> Result<ProcessGroup> {
    let store = if rank == 0 { Store::serve(port) } else { Store::connect(ADDRESSES[0], port) };
    let options = GroupConfig { timeout: TIMEOUT, ..Default::default() };
    GroupConfig { interface: Some(INTERFACE.to_owned()), ..options }.join(&store?, rank, 2)
}

/// Until the test lets both ranks go on.
fn wait() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
#[ignore = "a rank of the test below"]
fn rank() {
    let Ok(file) = std::env::var(FILE) else { return };
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    // Loading CUDA can take longer than the timeout of the group.
    drop(Tensor::zeros([1], (Kind::Float, Device::Cpu)));
    println!("rank: loaded");
    wait();
    let first = group(rank, PORTS[0]).unwrap();
    let mut training = Training::new(&first, None).unwrap();
    for step in 0..STEPS {
        training.step(step).unwrap();
    }
    training.save(&first, Path::new(&file)).unwrap();
    println!("rank: trained");
    // Until the link is cut.
    let mut begin = Instant::now();
    let error = loop {
        match training.step(STEPS) {
            Ok(()) => begin = Instant::now(),
            Err(error) => break error,
        }
    };
    println!("rank: failed after {} s: {error}", begin.elapsed().as_secs_f64());
    drop((training, first));
    wait();
    let second = group(rank, PORTS[1]).unwrap();
    let saved = Checkpoint::load(&file).unwrap();
    let mut training = Training::new(&second, Some(&saved)).unwrap();
    for step in STEPS..2 * STEPS {
        training.step(step).unwrap();
    }
    second.barrier().unwrap();
    println!("rank: weights {}", hex(&training.net.ws));
}

#[test]
fn a_cut_link_is_an_error_on_both_hosts_and_a_new_group_resumes() {
    let Some(hosts) = Hosts::join() else {
        return skipped("two hosts need network namespaces: root on Linux, and the program `ip`");
    };
    let (_folder, file) = Folder::with("training.safetensors");
    let mut both = [0, 1].map(|rank| hosts.start(rank, &file));
    both.iter_mut().for_each(|rank| drop(rank.after("rank: loaded")));
    both.iter_mut().for_each(let_go_on);
    both.iter_mut().for_each(|rank| drop(rank.after("rank: trained")));
    hosts.set_link("down");
    for rank in &mut both {
        let failed = rank.after("rank: failed after ");
        let (seconds, error) = failed.split_once(" s: ").unwrap();
        // The timeout of the group, and five seconds in which the ranks report.
        let limit = 3.0 * TIMEOUT.as_secs_f64() + 10.0;
        assert!(seconds.parse::<f64>().unwrap() < limit, "{failed}");
        assert!(error.contains("failed on rank"), "{failed}");
    }
    hosts.set_link("up");
    both.iter_mut().for_each(let_go_on);
    let undisturbed = ranks(2, |group| {
        let mut training = Training::new(&group, None).unwrap();
        (0..2 * STEPS).for_each(|step| training.step(step).unwrap());
        hex(&training.net.ws)
    });
    for rank in &mut both {
        assert_eq!(rank.after("rank: weights "), undisturbed[0]);
    }
}
