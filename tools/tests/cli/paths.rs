//! Two ways to one namespace, over wires that are cut without a word while a host writes, reads and flushes.
//!
//! Host, wires and server each have a network namespace of their own, so nothing of this is seen outside. A wire is a bridge
//! whose port to the server is taken out: both ends keep their link and hear nothing any more. Needs root and `ip`; says so
//! where it is skipped.

pub mod load;
mod wires;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use crate::common::Place;
use crate::common::server::Server;
use serde_json::Value;
use wires::Wires;

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:2f3c5a90-58f1-4d1c-9a0c-3b8d6b3e7a11";
/// The test below, which is started once more as the host.
const TEST: &str = "paths::requests_go_on_while_wires_are_cut_and_repaired";
/// Far more than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// The host, a process of its own that tells every 100 ms what its paths have done.
struct Host {
    child: Child,
    orders: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Host {
    fn start(wires: &Wires, target: &str) -> Host {
        let mut command = wires.inside_host(&std::env::current_exe().unwrap());
        command.args(["--exact", TEST, "--nocapture"]).env(load::TARGET, target);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Host { child, orders, output }
    }

    /// What it says next.
    fn report(&mut self) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the host has ended");
            // The harness of tests writes on the same line.
            if let Some(at) = line.find('{') {
                return serde_json::from_str(line[at..].trim_end()).unwrap();
            }
        }
    }

    /// Waits until it says what is wanted; gives that and how long it took.
    fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> (Value, Duration) {
        let begin = Instant::now();
        loop {
            let report = self.report();
            assert_eq!(report["failed"], Value::Array(Vec::new()), "{what}");
            if wanted(&report) {
                return (report, begin.elapsed());
            }
            assert!(begin.elapsed() < LIMIT, "{what} did not come: {report}");
        }
    }

    /// Has it check everything once more, and end.
    fn end(mut self) -> Value {
        drop(self.orders.take());
        let (last, _) = self.until("the last word", |report| report["last"] == true);
        assert!(self.child.wait().unwrap().success());
        last
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn requests(report: &Value, path: usize) -> u64 {
    report["paths"][path]["requests"].as_u64().unwrap()
}

fn is_live(report: &Value, path: usize) -> bool {
    report["paths"][path]["live"] == true
}

/// Cuts one wire, sees the other path do the work, repairs the wire, and sees the path come back.
fn cut_and_repair(host: &mut Host, wires: &Wires, path: usize) {
    let other = 1 - path;
    wires.cut(path);
    let (noticed, until_noticed) = host.until("the cut", |report| !is_live(report, path));
    let goes_on = |report: &Value| requests(report, other) > requests(&noticed, other) + 200;
    host.until("the work over the other path", goes_on);
    wires.mend(path);
    let (back, until_back) = host.until("the path", |report| is_live(report, path));
    host.until("its requests", |report| requests(report, path) > requests(&back, path) + 200);
    // The other path may be cut next: of what was written before this one came back, some may be on that path alone until a flush that
    // began since has ended.
    let flushes = |report: &Value| report["flushes"].as_u64().unwrap();
    host.until("a flush", |report| flushes(report) > flushes(&back) + load::LANES);
    eprintln!("path {path}: failed {until_noticed:.1?} after the cut, back {until_back:.1?} after it was mended");
}

#[test]
fn requests_go_on_while_wires_are_cut_and_repaired() {
    if let Ok(target) = std::env::var(load::TARGET) {
        return load::run(&target);
    }
    let Some(wires) = Wires::new() else { return };
    let place = Place::new();
    place.run("create v --size 64MiB --guard crc32c").succeeds();
    let mut serve = wires.inside_server(env!("CARGO_BIN_EXE_sealblock").as_ref());
    serve.args(["serve", "v", "--json", "--protection", "shown", "--allow-host", HOST]).current_dir(place.path(""));
    let server = Server::spawn({
        serve.args(["--listen", &wires.listener(0), "--listen", &wires.listener(1)]);
        serve
    });
    let path = |wire| {
        let options = format!("hostnqn={HOST}&timeout=2s&keepalive=2s");
        format!("nvme+tcp://{}/nqn.2026-11.io.sealblock:v?{options}", wires.listener(wire))
    };
    let mut host = Host::start(&wires, &format!("multipath:{},{}", path(0), path(1)));
    host.until("both paths", |report| requests(report, 0) > 200 && requests(report, 1) > 200);
    cut_and_repair(&mut host, &wires, 0);
    cut_and_repair(&mut host, &wires, 1);
    let last = host.end();
    let seconds = |name: &str| last[name].as_f64().unwrap();
    let (pause, longest) = (seconds("longest_pause_s"), seconds("longest_request_s"));
    eprintln!("{} requests, none failed; longest pause {pause:.2} s, longest request {longest:.2} s", last["done"]);
    // A command may take 2 s, noticed up to an eighth late. Behind a fence a write may wait for the quarantine, and 30 s at most.
    assert!(pause < 10.0, "all requests stood still for {pause} s");
    assert!(longest < 35.0, "one request took {longest} s");
    server.stop().is_clean();
    place.run("verify v").succeeds();
}
