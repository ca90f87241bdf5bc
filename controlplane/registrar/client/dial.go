package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"aether/controlplane/registrypb"
	"aether/mtls"
	"aether/mtls/spiffeid"
)

// How a connection that is dead is noticed: the kernel asks after deadIdle, and gRPC
// as well, so that a process that hangs is no better than one that has gone.
const (
	deadIdle  = 15 * time.Second
	deadEvery = 5 * time.Second
	deadTries = 3
)

// window is what a registrar may send ahead: a snapshot's worth of a scope.
const window = 1 << 20

// dial is Config.Dial.
func (c *Client) dial(_ context.Context, addr string) (registrypb.RegistrarServiceClient, io.Closer, error) {
	creds := c.cfg.Credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	d := net.Dialer{Timeout: connectTime, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: deadIdle, Interval: deadEvery, Count: deadTries}}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: connectTime}),
		grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithNoProxy(), grpc.WithUserAgent("aether"),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(2 * window),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
	}
	if c.pings.Load() {
		options = append(options, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: deadIdle, Timeout: deadTries * deadEvery}))
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, options...)
	if err != nil {
		return nil, nil, fmt.Errorf("dial: %w", err)
	}
	return registrypb.NewRegistrarServiceClient(conn), conn, nil
}

// TLS is mTLS to a registrar: svid, asked at each handshake, is who this node is (nil:
// nobody yet, and nothing is dialled), server the one identity that is accepted.
func TLS(svid func() *mtls.SVID, server spiffeid.ID) credentials.TransportCredentials {
	return &meshTLS{svid: svid, server: server}
}

type meshTLS struct {
	svid   func() *mtls.SVID
	server spiffeid.ID
}

// ClientHandshake is credentials.TransportCredentials. The server name is the port, as on
// every hop of the mesh (contract 5.1).
func (m *meshTLS) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	s := m.svid()
	if s == nil {
		return nil, nil, errors.New("this node has no certificate yet")
	}
	_, port, err := net.SplitHostPort(authority)
	if err != nil {
		return nil, nil, fmt.Errorf("authority %q: %w", authority, err)
	}
	cfg := mtls.ClientConfig(mtls.Client{SVID: s, SNI: port, ALPN: []string{"h2"}, Pin: m.server})
	return credentials.NewTLS(cfg).ClientHandshake(ctx, port, conn) // which makes a server name of what it is given
}

// ServerHandshake is credentials.TransportCredentials: a client has none.
func (m *meshTLS) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("registrar client: no server")
}

// Info is credentials.TransportCredentials.
func (m *meshTLS) Info() credentials.ProtocolInfo {
	return credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}).Info()
}

// Clone is credentials.TransportCredentials.
func (m *meshTLS) Clone() credentials.TransportCredentials { c := *m; return &c }

// OverrideServerName is credentials.TransportCredentials: names are not looked at.
func (m *meshTLS) OverrideServerName(string) error { return nil }

// dataLoss reports whether the registrar could not tell all (contract 9.7).
func dataLoss(err error) bool { return status.Code(err) == codes.DataLoss }

// tooManyPings reports whether a registrar does not want to be asked whether it lives.
func tooManyPings(err error) bool {
	return err != nil && strings.Contains(err.Error(), "too_many_pings")
}

// explain says what keeps the registrar from being heard, and how to mend it.
func explain(addr string, err error) string {
	if addr == "" {
		return fmt.Sprintf("%v; does --registrar name it, and does DNS know it?", err)
	}
	mend := "it is tried again, and others with it"
	switch status.Code(err) {
	case codes.Unavailable:
		mend = "is it running, and does a NetworkPolicy let this node through?"
	case codes.Unauthenticated, codes.PermissionDenied:
		mend = "it does not accept this node's certificate: both must be of one trust domain"
	case codes.Unimplemented:
		mend = "what listens there is no registrar: check --registrar"
	case codes.DataLoss:
		mend = "this node read too slowly; it asks for everything again"
	case codes.ResourceExhausted:
		mend = "it has no room for this node: it needs more replicas, or memory"
	}
	return fmt.Sprintf("registrar %s: %v; %s", addr, err, mend)
}
