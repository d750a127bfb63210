"""Certificates and keys of a deployment: an authority of its own, the server's certificate, one key per node."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID


def write_certificates(folder: Path) -> None:
    """`ca.crt`, `server.pem` and `server.key`, for 127.0.0.1 and localhost, valid for a day."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    authority_name, server_name = _name("test authority"), _name("localhost")
    for_certificates = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    authority = (
        _certificate(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(for_certificates, critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    server = (
        _certificate(server_name, authority_name, server_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(authority.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(Encoding.PEM))
    _write_key(folder / "server.key", server_key, PrivateFormat.PKCS8)


def write_node_key(file: Path) -> bytes:
    """A private key as `ssh-keygen -t ecdsa -b 384` writes it; returns the public key as Flower registers it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(file, key, PrivateFormat.OpenSSH)
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    file.touch(mode=0o600)
    file.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
