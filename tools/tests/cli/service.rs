//! `sealblock serve` under a service manager: what it tells it, the sockets it gets from it, and where it is started.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::server::Server;
use crate::common::{Answer, Place, answer};

#[test]
fn a_service_manager_is_told() {
    let place = Place::new();
    let socket = UnixDatagram::bind(place.path("notify")).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut command = place.command("serve --json mem:1MiB --listen 127.0.0.1:0");
    command.env("NOTIFY_SOCKET", place.path("notify"));
    let mut server = Server::spawn(command);
    let said = || {
        let mut bytes = [0; 256];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    };
    assert_eq!(said(), "READY=1");
    server.signal("HUP");
    assert!(said().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!((said().as_str(), &server.event()["event"]), ("READY=1", &"reloaded".into()));
    server.signal("INT");
    assert_eq!(said(), "STOPPING=1");
    server.wait().is_clean();
}

/// The binary with `nvme` and `nbd` as the sockets 3 and 4 of a service manager. Its standard error is lost.
fn activated(place: &Place, arguments: &str, nvme: impl Into<OwnedFd>, nbd: impl Into<OwnedFd>) -> Command {
    let binary = place.command("");
    let sockets = "exec 3<&0 4<&2 </dev/null 2>errors; LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=nvme:nbd exec \"$@\"";
    let mut command = Command::new("sh");
    command
        .args(["-c", sockets, "sh"])
        .arg(binary.get_program())
        .args(binary.get_args())
        .args(arguments.split_whitespace());
    command.current_dir(place.path("")).envs(binary.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdin(Stdio::from(nvme.into())).stdout(Stdio::piped()).stderr(Stdio::from(nbd.into()));
    command
}

fn address(listener: &TcpListener) -> SocketAddr {
    listener.local_addr().unwrap()
}

#[test]
fn sockets_of_a_service_manager_are_served_and_outlive_the_server() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let space = "[[subsystems]]\nname = \"v\"\n[[subsystems.namespaces]]\ntarget = \"v\"\n";
    // The manager's sockets stand for these.
    place.write("c.toml", format!("[[listeners]]\naddress = \"127.0.0.1:1\"\n{space}").as_bytes());
    let [nvme, nbd] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let (nvme_uri, nbd_uri) =
        (format!("nvme+tcp://{}/nqn.2026-11.io.sealblock:v", address(&nvme)), format!("nbd://{}/v", address(&nbd)));
    let serve = |arguments: &str| {
        let (nvme, nbd) = (nvme.try_clone().unwrap(), nbd.try_clone().unwrap());
        let child = activated(&place, arguments, nvme, nbd);
        Server::spawn_without_errors(child)
    };
    for _ in 0..2 {
        let mut server = serve("serve --json --config c.toml");
        assert_eq!(server.ready["listeners"], serde_json::json!([address(&nvme).to_string()]));
        assert_eq!(server.ready["nbd"]["listeners"], serde_json::json!([address(&nbd).to_string()]));
        place.run(&format!("verify {nvme_uri}")).succeeds();
        place.run(&format!("copy {nbd_uri} copied")).succeeds();
        // Whatever the configuration says of listeners now, these stay.
        place.write("c.toml", space.as_bytes());
        server.signal("HUP");
        assert_eq!(server.event()["listeners"], server.ready["listeners"]);
        place.run(&format!("verify {nvme_uri}")).succeeds();
        server.stop().is_clean();
        assert_eq!(place.read("errors"), b"", "nothing is wrong");
    }
    // The socket is the manager's, and what came while no server ran is answered by the next server.
    let waiting = place.start(&format!("verify {nvme_uri}"));
    let server = serve("serve --json --config c.toml");
    crate::common::answer_of(waiting).succeeds();
    server.stop().is_clean();
}

#[test]
fn what_is_no_socket_is_refused() {
    let place = Place::new();
    let unix = UnixListener::bind(place.path("unix")).unwrap();
    let nvme = TcpListener::bind("127.0.0.1:0").unwrap();
    let refused: Answer = answer(&mut activated(&place, "serve mem:1MiB", nvme, unix));
    refused.ends_with(2);
    let errors = String::from_utf8(place.read("errors")).unwrap();
    assert!(errors.contains("socket 4") && errors.contains("ListenStream="), "{errors}");
}

#[test]
fn paths_of_a_configuration_begin_at_its_folder() {
    let place = Place::new();
    fs::create_dir(place.path("etc")).unwrap();
    fs::create_dir(place.path("elsewhere")).unwrap();
    for name in ["etc/v", "w"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    let space = |name: &str, target: &str| {
        format!("[[subsystems]]\nname = \"{name}\"\n[[subsystems.namespaces]]\ntarget = \"{target}\"\n")
    };
    place.write("etc/c.toml", space("a", "v").as_bytes());
    let served = |server: &serde_json::Value| server["subsystems"][0]["namespaces"][0]["target"].clone();
    for config in [place.path("etc/c.toml").to_str().unwrap(), "../etc/c.toml"] {
        let mut command = place.command(&format!("serve --json --listen 127.0.0.1:0 --config {config}"));
        command.current_dir(place.path("elsewhere"));
        let mut server = Server::spawn(command);
        let folder = config.strip_suffix("c.toml").unwrap();
        assert_eq!(served(&server.ready), format!("{folder}v"));
        place.run(&format!("verify {}", server.target("a"))).succeeds();
        // A path that says all is left as it is, and the same rule holds when the file is read again.
        let absolute = place.path("w").to_str().unwrap().to_owned();
        for (target, now) in [(absolute.as_str(), absolute.clone()), ("v", format!("{folder}v"))] {
            place.write("etc/c.toml", space("a", target).as_bytes());
            server.signal("HUP");
            assert_eq!(served(&server.event()), now);
        }
        server.stop().is_clean();
    }
}
