//! Where stores listen, and what goes wrong with them.

use std::net::TcpListener;

use tch_amp::Error;
use tch_amp::distributed::{DistributedError, GroupConfig, Store};

use super::TIMEOUT;

/// The local addresses of the listening sockets of this machine with this port, as the kernel writes them.
#[cfg(target_os = "linux")]
fn listening(port: u16) -> Vec<String> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap());
    let lines = tables.iter().flat_map(|table| table.lines().skip(1));
    let fields = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let listen = fields.filter(|fields| fields[3] == "0A");
    let addresses = listen.map(|fields| fields[1].to_owned());
    addresses.filter(|address| address.ends_with(&format!(":{port:04X}"))).collect()
}

#[test]
fn processes_of_one_machine_meet_on_the_loopback_interface_only() {
    let store = Store::serve_locally().unwrap();
    let port = store.port().unwrap();
    #[cfg(target_os = "linux")]
    assert_eq!(listening(port), [format!("0100007F:{port:04X}")]);
    let other = Store::connect("127.0.0.1", port).unwrap();
    let options = GroupConfig { timeout: TIMEOUT, ..Default::default() };
    std::thread::scope(|scope| {
        scope.spawn(|| options.join(&other, 1, 2).unwrap().barrier().unwrap());
        options.join(&store, 0, 2).unwrap().barrier().unwrap();
    });
}

#[test]
fn a_port_in_use_is_an_error() {
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Store::serve(port).unwrap_err();
    let is_named = matches!(
        &error,
        Error::Distributed(DistributedError::Store { address, .. }) if address.ends_with(&format!(":{port}"))
    );
    assert!(is_named, "{error}");
}

#[test]
fn a_port_that_the_other_ranks_cannot_know_is_refused() {
    for refused in [Store::serve(0).unwrap_err(), Store::connect("127.0.0.1", 0).unwrap_err()] {
        assert!(matches!(refused, Error::InvalidArgument { name: "port", .. }), "{refused}");
    }
}

#[test]
fn names_with_nul_are_refused() {
    let store = Store::in_process().unwrap();
    let options = GroupConfig { name: Some("a\0b".to_owned()), ..Default::default() };
    let refused = options.join(&store, 0, 1).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument { name: "name", .. }), "{refused}");
    assert!(Store::connect("local\0host", 1).is_err());
}
