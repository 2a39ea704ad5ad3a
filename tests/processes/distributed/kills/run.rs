//! One short run, one process of which is disturbed.

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use tch_amp::distributed::Store;

use super::super::processes::free_port;
use super::super::system::{children, is_alive, is_stopped, kill, variable};
use super::rank::command;

/// How long a run may take on a busy machine.
const BOUND: Duration = Duration::from_secs(90);

/// Who starts the ranks and serves their store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// A process that calls `spawn`.
    BySpawn,
    /// This process starts them and serves the store, as torchrun does.
    ByAgent,
    /// This process starts them, and rank 0 serves the store.
    Alone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    Nothing,
    /// A rank is killed.
    Kill(usize),
    /// A rank is stopped, and goes on when the others have ended.
    Stop(usize),
    /// The process that has called `spawn` is killed.
    KillParent,
}

#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub size: usize,
    pub started: Started,
    pub disturbance: Disturbance,
    /// When it is disturbed, from the start of the last process on.
    pub moment: Duration,
}

/// How the processes have ended: the ranks, or the one that has called `spawn`.
pub struct Ended {
    pub statuses: Vec<ExitStatus>,
    /// Everything that they have printed.
    pub output: String,
    pub time: Duration,
    /// Whether the process to be disturbed was there at the moment.
    pub disturbed: bool,
}

impl Run {
    pub fn run(&self) -> Ended {
        let start = Instant::now();
        let store = (self.started == Started::ByAgent).then(|| Store::serve_locally().unwrap());
        let mut processes = self.start(store.as_ref());
        let ranks = self.ranks(&processes);
        let moment = Instant::now();
        while moment.elapsed() < self.moment && ranks.iter().any(|rank| is_alive(*rank)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let disturbed = self.disturb(&ranks, processes[0].id());
        let statuses = self.wait(&mut processes, &ranks, start);
        let time = start.elapsed();
        // A killed process that has called `spawn` leaves its ranks to the system.
        while ranks.iter().any(|rank| is_alive(*rank)) {
            assert!(start.elapsed() < BOUND, "{self:?}: ranks are left");
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = processes.into_iter().map(|child| child.wait_with_output().unwrap());
        let text = output.map(|output| String::from_utf8([output.stdout, output.stderr].concat()));
        Ended { statuses, output: text.map(Result::unwrap).collect(), time, disturbed }
    }

    fn start(&self, store: Option<&Store>) -> Vec<Child> {
        if self.started == Started::BySpawn {
            return vec![command(self.timeout(), self.size).spawn().unwrap()];
        }
        let port = store.map_or_else(free_port, |store| store.port().unwrap().to_string());
        let agent = if store.is_some() { "True" } else { "False" };
        let rank = |rank: usize| {
            let mut process = command(self.timeout(), 0);
            process.env("RANK", rank.to_string()).env("WORLD_SIZE", self.size.to_string());
            process.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            process.env("TORCHELASTIC_USE_AGENT_STORE", agent);
            process.spawn().unwrap()
        };
        (0..self.size).map(rank).collect()
    }

    /// The timeout of the group. One that is shorter than the start of all ranks takes is no error in a disturbed run.
    fn timeout(&self) -> Duration {
        Duration::from_secs(match self.disturbance {
            Disturbance::Nothing => 60,
            Disturbance::Stop(_) => 2,
            _ => 5,
        })
    }

    /// The numbers of the processes that are ranks.
    fn ranks(&self, processes: &[Child]) -> Vec<u32> {
        if self.started != Started::BySpawn {
            return processes.iter().map(Child::id).collect();
        }
        let start = Instant::now();
        loop {
            let children = children(processes[0].id());
            let rank = |rank: usize| {
                let is_it = |child: &u32| variable(*child, "RANK") == Some(rank.to_string());
                children.iter().copied().find(is_it)
            };
            if let Some(ranks) = (0..self.size).map(rank).collect() {
                return ranks;
            }
            assert!(start.elapsed() < BOUND, "{self:?}: no ranks");
        }
    }

    fn disturb(&self, ranks: &[u32], parent: u32) -> bool {
        let (signal, process) = match self.disturbance {
            Disturbance::Nothing => return false,
            Disturbance::Kill(rank) => ("KILL", ranks[rank]),
            Disturbance::Stop(rank) => ("STOP", ranks[rank]),
            Disturbance::KillParent => ("KILL", parent),
        };
        let is_there = is_alive(process);
        kill(signal, process);
        is_there
    }

    /// Waits for all processes.
    fn wait(&self, processes: &mut [Child], ranks: &[u32], start: Instant) -> Vec<ExitStatus> {
        loop {
            let statuses = processes.iter_mut().map(|child| child.try_wait().unwrap());
            if let Some(statuses) = statuses.collect() {
                return statuses;
            }
            let is_last = |stopped: usize| {
                let mut others = ranks.iter().enumerate().filter(|(rank, _)| *rank != stopped);
                is_stopped(ranks[stopped]) && !others.any(|(_, rank)| is_alive(*rank))
            };
            if let Disturbance::Stop(rank) = self.disturbance
                && is_last(rank)
            {
                kill("CONT", ranks[rank]);
            }
            assert!(start.elapsed() < BOUND, "{self:?} hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
