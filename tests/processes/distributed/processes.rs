//! Ranks that are processes, which find each other through the environment.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tch::Tensor;
use tch_amp::distributed::{GroupConfig, ReduceOp};

use testkit::programs::{this_test, this_test_by};
use testkit::python::Oracle;

/// The timeout of the group in seconds, if it is not 30.
const TIMEOUT: &str = "TCH_AMP_TEST_TIMEOUT";

/// What [`rank`] is to do.
const TASK: &str = "TCH_AMP_TEST_TASK";

/// This program again, as a rank.
pub fn spawn(task: &str, variables: &[(&str, &str)]) -> Child {
    command(task, variables).spawn().unwrap()
}

fn command(task: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = this_test("distributed::processes::rank");
    command
        .env(TASK, task)
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A rank with these variables, and with others that add to them or replace them.
pub fn spawn_rank(
    task: &str,
    rank: usize,
    size: usize,
    port: &str,
    others: &[(&str, &str)],
) -> Child {
    let [rank, size] = &[rank, size].map(|number| number.to_string());
    let numbers = [("RANK", rank.as_str()), ("WORLD_SIZE", size.as_str()), ("MASTER_PORT", port)];
    spawn(task, &[&numbers[..], &[("MASTER_ADDR", "localhost")], others].concat())
}

/// All ranks of a group.
pub fn spawn_ranks(task: &str, size: usize) -> Vec<Child> {
    let port = free_port();
    (0..size).map(|rank| spawn_rank(task, rank, size, &port, &[])).collect()
}

/// Waits until a rank is about to join its group.
fn await_coming(child: &mut Child) {
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("comes")), "the rank has ended");
}

pub fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// The lines that a rank printed after `rank: `.
fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    // The first line can begin with the name of the test.
    lines.filter_map(|line| line.split_once("rank: ").map(|(_, line)| line.to_owned()))
}

pub fn only_line(mut child: Child) -> String {
    let line = lines(&mut child).next();
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    child.wait().unwrap();
    line.unwrap_or_else(|| panic!("a rank printed nothing: {errors}"))
}

#[test]
#[ignore = "a rank of the other tests"]
fn rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    let seconds = std::env::var(TIMEOUT).map_or(30, |seconds| seconds.parse().unwrap());
    let options = GroupConfig { timeout: Duration::from_secs(seconds), ..Default::default() };
    println!("comes");
    let group = match options.from_env() {
        Ok(group) => group,
        Err(error) => return println!("rank: {error}"),
    };
    let mut sum = Tensor::from(group.rank() as i64 + 1);
    for run in [super::saves::run, super::resuming::run, super::nccl::run] {
        if let Some(line) = run(&group, &task) {
            return println!("rank: {line}");
        }
    }
    match task.as_str() {
        "sum" => {
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            println!("rank: {} of {}", group.rank(), sum.int64_value(&[]));
            group.barrier().unwrap();
        }
        "restart" => {
            let is_first = std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap() == "0";
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            if is_first && group.rank() == 1 {
                std::process::exit(3);
            }
            // At the first attempt, rank 1 has left.
            group.barrier().unwrap();
            println!("rank: {} of {}", group.rank(), sum.int64_value(&[]));
        }
        _ => {
            println!("rank: begins");
            loop {
                if let Err(error) = group.all_reduce(&mut sum, ReduceOp::Min) {
                    return println!("rank: {error}");
                }
            }
        }
    }
}

#[test]
fn the_environment_forms_a_group() {
    let lines: Vec<_> = spawn_ranks("sum", 3).into_iter().map(only_line).collect();
    assert_eq!(lines, ["0 of 6", "1 of 6", "2 of 6"]);
}

#[test]
fn a_killed_rank_is_named_at_once() {
    for killed in [0, 1] {
        let mut children = spawn_ranks("spin", 2);
        let mut output: Vec<_> = children.iter_mut().map(lines).collect();
        for lines in &mut output {
            assert_eq!(lines.next().unwrap(), "begins");
        }
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        children[killed].kill().unwrap();
        let error = output[1 - killed].next().unwrap();
        assert!(error.contains(&format!("rank {killed} does not answer")), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20));
        for child in &mut children {
            child.wait().unwrap();
        }
    }
}

#[test]
fn a_wrong_environment_is_an_error_that_names_the_variable() {
    let all =
        [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    // At once, since each waits for others to tell them.
    let mut started = Vec::new();
    for (i, (name, _)) in all.iter().enumerate() {
        let others: Vec<_> = all.iter().copied().filter(|(other, _)| other != name).collect();
        started.push((format!("{name} is not set"), spawn("sum", &others)));
        if *name != "MASTER_ADDR" {
            let mut wrong = all;
            wrong[i].1 = "x1";
            started.push((format!("{name} is \"x1\""), spawn("sum", &wrong)));
        }
    }
    let too_large = "RANK is 2, but must be less than WORLD_SIZE".to_owned();
    started.push((too_large, spawn_rank("sum", 2, 2, "1", &[])));
    for (expected, child) in started {
        let line = only_line(child);
        assert!(line.starts_with(&expected), "{expected}: {line}");
    }
}

#[test]
fn values_that_no_group_can_have_are_errors_that_name_the_variable() {
    let values = [
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_ADDR", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "65537"),
        ("WORLD_SIZE", "2000000"),
        ("WORLD_SIZE", "99999999999"),
        ("WORLD_SIZE", "99999999999999999999999"),
    ];
    for rank in [0, 1] {
        let start = Instant::now();
        // At once, since rank 0 waits for others to tell them.
        let wrong = values.map(|(name, value)| {
            let others = [(TIMEOUT, "300"), (name, value)];
            (name, value, spawn_rank("sum", rank, 2, &free_port(), &others))
        });
        for (name, value, child) in wrong {
            let line = only_line(child);
            assert!(line.starts_with(&format!("{name} is ")), "{value}: {line}");
        }
        // None has waited for the timeout of the group.
        assert!(start.elapsed() < Duration::from_secs(150));
    }
}

#[test]
fn a_rank_whose_variables_are_wrong_does_not_keep_the_others_waiting() {
    for (name, value, guilty) in [
        ("WORLD_SIZE", "4", 2),
        ("WORLD_SIZE", "99999999999", 2),
        ("WORLD_SIZE", "x", 2),
        ("WORLD_SIZE", "0", 2),
        ("RANK", "7", 2),
        ("RANK", "", 2),
        // The rank that serves the store.
        ("WORLD_SIZE", "0", 0),
    ] {
        let port = free_port();
        let begin = |rank: usize| {
            let others = [(TIMEOUT, "300"), (name, value)];
            let others = if rank == guilty { &others[..] } else { &others[..1] };
            let mut child = spawn_rank("sum", rank, 3, &port, others);
            await_coming(&mut child);
            child
        };
        let others = [1, 2 - guilty].map(begin);
        let (start, wrong) = (Instant::now(), begin(guilty));
        let cause = only_line(wrong);
        assert!(cause.starts_with(name) || cause.starts_with("size"), "{cause}");
        for line in others.map(only_line) {
            assert!(line.contains(&cause), "{name} is {value}: {line}, {cause}");
        }
        assert!(start.elapsed() < Duration::from_secs(150));
    }
}

#[test]
fn values_that_are_not_utf_8_are_errors_that_name_the_variable() {
    let names = [
        ("RANK", false),
        ("WORLD_SIZE", false),
        ("MASTER_ADDR", false),
        ("MASTER_PORT", false),
        ("TORCHELASTIC_USE_AGENT_STORE", false),
        ("TORCHELASTIC_RESTART_COUNT", true),
        ("TORCHELASTIC_RUN_ID", false),
        ("SLURM_JOB_ID", false),
        ("GLOO_SOCKET_IFNAME", false),
    ];
    // At once, since some wait for others to tell them.
    let started = names.map(|(name, agent)| {
        let port = free_port();
        let address = if name == "GLOO_SOCKET_IFNAME" { "0.0.0.0" } else { "127.0.0.1" };
        let variables =
            [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", address), ("MASTER_PORT", &port)];
        let mut command = command("sum", &variables);
        command.env_remove("TORCHELASTIC_RUN_ID").env(name, OsStr::from_bytes(b"1\xff"));
        if agent {
            command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        }
        (name, command.spawn().unwrap())
    });
    for (name, child) in started {
        let line = only_line(child);
        let expected = format!("{name} is \"1\\xFF\", but must be UTF-8");
        assert!(line.starts_with(&expected), "{line}");
    }
}

#[test]
fn a_port_in_use_is_an_error_of_rank_0() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let line = only_line(spawn_rank("sum", 0, 1, &port.to_string(), &[]));
    assert!(line.contains(&format!("127.0.0.1:{port} cannot be used")), "{line}");
}

#[test]
fn torchrun_starts_the_ranks_and_restarts_them_after_a_failure() {
    let Some(oracle) = Oracle::find("distributed.py") else { return };
    let python = oracle.command().get_program().to_str().unwrap().to_owned();
    let torchrun = [python.as_str(), "-m", "torch.distributed.run", "--no-python", "--standalone"];
    let words = [&torchrun[..], &["--nproc-per-node=2", "--max-restarts=1"]].concat();
    let mut command = this_test_by(&words, "distributed::processes::rank");
    let output = command.env(TASK, "restart").env("OMP_NUM_THREADS", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    for line in ["rank: 0 of 3", "rank: 1 of 3"] {
        assert_eq!(text.matches(line).count(), 1, "{text}");
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
}
