//! Three network namespaces: a host, a server, and two wires between them.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The namespaces; gone when this is.
pub struct Wires {
    host: String,
    middle: String,
    server: String,
}

impl Wires {
    /// Sets everything up, or says why that cannot be and gives nothing.
    pub fn new() -> Option<Wires> {
        let name = |part: &str| format!("sealblock-{}-{part}", std::process::id());
        let wires = Wires { host: name("host"), middle: name("wires"), server: name("server") };
        match wires.set_up() {
            Ok(()) => Some(wires),
            Err(why) => {
                eprintln!("SKIPPED: no network namespaces, which takes root, `ip`, veth and bridges: {why}");
                None
            }
        }
    }

    fn set_up(&self) -> Result<(), String> {
        for name in [&self.host, &self.middle, &self.server] {
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        (0..2).try_for_each(|wire| self.lay(wire))
    }

    fn lay(&self, wire: usize) -> Result<(), String> {
        let Wires { host, middle, server } = self;
        ip(&format!("-n {middle} link add wire{wire} type bridge"))?;
        ip(&format!("-n {middle} link set wire{wire} up"))?;
        for (end, namespace, last) in [("host", host, 1), ("server", server, 2)] {
            let (inner, outer) = (format!("{end}{wire}"), format!("eth{wire}"));
            ip(&format!("-n {middle} link add {inner} type veth peer name {outer} netns {namespace}"))?;
            ip(&format!("-n {middle} link set {inner} master wire{wire} up"))?;
            ip(&format!("-n {namespace} address add 10.77.{wire}.{last}/24 dev {outer}"))?;
            ip(&format!("-n {namespace} link set {outer} up"))?;
        }
        Ok(())
    }

    /// Where the server listens at the end of a wire.
    pub fn listener(&self, wire: usize) -> String {
        format!("10.77.{wire}.2:4420")
    }

    /// From now on packets are dropped silently.
    pub fn cut(&self, wire: usize) {
        ip(&format!("-n {} link set server{wire} nomaster", self.middle)).unwrap();
    }

    /// The wire is whole again.
    pub fn mend(&self, wire: usize) {
        ip(&format!("-n {} link set server{wire} master wire{wire}", self.middle)).unwrap();
    }

    pub fn inside_host(&self, program: &Path) -> Command {
        inside(&self.host, program)
    }

    pub fn inside_server(&self, program: &Path) -> Command {
        inside(&self.server, program)
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for name in [&self.host, &self.middle, &self.server] {
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

fn inside(namespace: &str, program: &Path) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(program);
    command
}

fn ip(arguments: &str) -> Result<(), String> {
    let mut command = Command::new("ip");
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    let Output { status, stderr, .. } = command.output().map_err(|error| format!("ip: {error}"))?;
    let why = || format!("ip {arguments}: {}", String::from_utf8_lossy(&stderr).trim());
    if status.success() { Ok(()) } else { Err(why()) }
}
