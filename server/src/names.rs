//! How clients on this machine and elsewhere name what is served: as words of a shell, and as URIs.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use sealblock_stack::target::encode;

/// A name as one word of a shell.
pub fn shell_word(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/:@+,".contains(c);
    match !name.is_empty() && name.chars().all(is_plain) {
        true => name.to_owned(),
        false => format!("'{}'", name.replace('\'', r"'\''")),
    }
}

/// How hosts name a namespace as a target: by its number where the subsystem has several, and as a host that may come.
pub fn namespace_uri(address: SocketAddr, nqn: &str, nsid: Option<u32>, host: Option<&str>) -> String {
    let nsid = nsid.map_or(String::new(), |nsid| format!("/{nsid}"));
    let as_host = host.map_or(String::new(), |host| format!("?hostnqn={}", encode(host, ":")));
    format!("nvme+tcp://{}:{}/{nqn}{nsid}{as_host}", host_text(address).1, address.port())
}

/// How clients name an NBD export as a target.
pub fn export_uri(address: SocketAddr, name: &str) -> String {
    format!("nbd://{}:{}/{}", host_text(address).1, address.port(), encode(name, ":/"))
}

/// How clients write an address, alone and in a URI.
pub fn host_text(address: SocketAddr) -> (String, String) {
    // The operator fills in an address of this machine that the hosts can reach.
    let host = if address.ip().is_unspecified() { "HOST".to_owned() } else { address.ip().to_string() };
    let in_uri = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    (host, in_uri)
}

/// The address by which this machine's own clients reach a listener.
pub fn on_this_machine(listener: SocketAddr) -> SocketAddr {
    let port = listener.port();
    match listener {
        SocketAddr::V4(address) if address.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, port).into(),
        SocketAddr::V6(address) if address.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, port).into(),
        other => other,
    }
}
