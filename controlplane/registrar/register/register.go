// Package register tells a registrar of this node's endpoints (contract 9.7), and asks
// it which of them it has.
//
//   - Registrars serve alike. One that answers is stayed with, so that what is said of
//     an endpoint goes one way and in order; one that does not is left for the next.
//   - Every call ends within its time, however many registrars it tried.
//
// It keeps nothing of what it says: what has to be said again is its caller's to know.
package register

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"aether/controlplane/registrar/target"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// Bounds.
const (
	callTime   = 5 * time.Second // of a call, all that it tries included (contract 13.3)
	listTime   = 20 * time.Second
	maxTries   = 3        // registrars a call
	maxList    = 64 << 20 // bytes of a listing: registrars that do not know node_name send all
	connectFor = 2 * time.Second
)

// Config of a Caller.
type Config struct {
	// Targets are where registrars are, "host:port"; each address of a host is one. Required.
	Targets []string
	// Credentials of each connection. nil: none, and no encryption: for a registrar on the loopback.
	Credentials credentials.TransportCredentials
	// Dial makes a connection to a registrar; the Closer ends it. nil: gRPC over TCP.
	Dial func(ctx context.Context, addr string) (registrypb.RegistrarServiceClient, io.Closer, error)
	// Resolve gives the addresses of a host name. nil: DNS.
	Resolve func(ctx context.Context, host string) ([]string, error)
}

// Caller calls registrars. Safe for concurrent use. Close ends it.
type Caller struct {
	cfg Config

	mu     sync.Mutex
	closed bool
	conn   *conn    // that answered last; nil: none
	next   []string // addresses that are still to be tried before DNS is asked again
}

// conn is a connection to one registrar, open until it is left and nobody uses it.
type conn struct {
	addr   string
	client registrypb.RegistrarServiceClient
	closer io.Closer
	users  int
	left   bool
}

// New makes a Caller; nothing is dialled before the first call.
func New(cfg Config) (*Caller, error) {
	if len(cfg.Targets) == 0 {
		return nil, errors.New("register: no registrar is named")
	}
	for _, t := range cfg.Targets {
		if err := target.Check(t); err != nil {
			return nil, err
		}
	}
	if cfg.Resolve == nil {
		cfg.Resolve = target.DNS
	}
	c := &Caller{cfg: cfg}
	if cfg.Dial == nil {
		c.cfg.Dial = c.dial
	}
	return c, nil
}

// Close ends the connection; calls under way go on until they end.
func (c *Caller) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.conn != nil {
		c.leaveLocked(c.conn)
	}
	return nil
}

func (c *Caller) dial(_ context.Context, addr string) (registrypb.RegistrarServiceClient, io.Closer, error) {
	creds := c.cfg.Credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	cc, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(creds), grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: connectFor}),
		grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithNoProxy(), grpc.WithUserAgent("aether"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxList)))
	if err != nil {
		return nil, nil, fmt.Errorf("dial: %w", err)
	}
	return registrypb.NewRegistrarServiceClient(cc), cc, nil
}

// Register writes a row under one of its classes.
func (c *Caller) Register(ctx context.Context, service model.ServiceName, class registrypb.Service_Protocol, e *registrypb.ServiceEndpoint) error {
	return c.call(ctx, callTime, func(ctx context.Context, r registrypb.RegistrarServiceClient) error {
		_, err := r.RegisterEndpoint(ctx, &registrypb.RegisterEndpointRequest{ServiceName: service.String(), Protocol: class, Endpoint: e})
		return err
	})
}

// Unregister takes an address from every class of the service, unless by is no longer
// what holds (registry.Statement.Keeps).
func (c *Caller) Unregister(ctx context.Context, service model.ServiceName, ip string, by registry.Statement) error {
	return c.call(ctx, callTime, func(ctx context.Context, r registrypb.RegistrarServiceClient) error {
		_, err := r.UnregisterEndpoint(ctx, &registrypb.UnregisterEndpointRequest{
			ServiceName: service.String(), Ips: []string{ip}, NodeName: by.Node, Stated: by.Stated,
		})
		return err
	})
}

// OfNode are the rows whose node_name is node, as one registrar has them, by the one text
// of their address (registry.Address). Rows of a service whose name cannot be read are left
// out: this node wrote none. registry.ErrDerived: there are none that this node wrote.
func (c *Caller) OfNode(ctx context.Context, node string) ([]registry.Row, error) {
	var rows []registry.Row
	derived := false
	err := c.call(ctx, listTime, func(ctx context.Context, r registrypb.RegistrarServiceClient) error {
		rows, derived = rows[:0], false // of a registrar that then failed
		for _, class := range []registrypb.Service_Protocol{
			registrypb.Service_PROTOCOL_HTTP, registrypb.Service_PROTOCOL_TCP, registrypb.Service_PROTOCOL_UDP,
		} {
			res, err := r.ListAllEndpoints(ctx, &registrypb.ListAllEndpointsRequest{Protocol: class, NodeName: node})
			if err != nil {
				return fmt.Errorf("list %s: %w", class, err)
			}
			if res.GetDerived() {
				derived = true
				return nil
			}
			for name, list := range res.GetServices() {
				service, err := registry.ParseService(name)
				if err != nil {
					continue
				}
				for _, e := range list.GetEndpoints() {
					if e.GetKubernetesMetadata().GetNodeName() == node {
						rows = append(rows, registry.Row{
							Region: e.GetLocality().GetRegion(), Cluster: e.GetClusterName(), Service: service, Protocol: class, IP: registry.Address(e.GetIp()), Endpoint: e,
						})
					}
				}
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return nil, err
	case derived:
		return nil, registry.ErrDerived
	}
	return rows, nil
}

// call calls one registrar after the other until one answers. What is wrong with the
// call itself the next one would say too.
func (c *Caller) call(ctx context.Context, limit time.Duration, f func(context.Context, registrypb.RegistrarServiceClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var errs []error
	for left := maxTries; left > 0 && ctx.Err() == nil; left-- {
		k, err := c.take(ctx)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		end, _ := ctx.Deadline()
		in, stop := context.WithTimeout(ctx, time.Until(end)/time.Duration(left))
		err = f(in, k.client)
		stop()
		again := err != nil && elsewhere(err)
		c.give(k, again)
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("registrar %s: %w", k.addr, err))
		if !again {
			break
		}
	}
	return cmp.Or(errors.Join(errs...), ctx.Err())
}

// elsewhere reports whether another registrar may do what this one did not.
func elsewhere(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.Canceled, codes.OutOfRange, codes.AlreadyExists, codes.FailedPrecondition:
		return false
	}
	return true
}

// take is the registrar that is stayed with, or the next one.
func (c *Caller) take(ctx context.Context) (*conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errors.New("register: closed")
	}
	if c.conn != nil {
		c.conn.users++
		return c.conn, nil
	}
	if len(c.next) == 0 {
		c.mu.Unlock()
		addrs, err := target.Resolve(ctx, c.cfg.Targets, c.cfg.Resolve)
		c.mu.Lock()
		if err != nil {
			return nil, err
		}
		if c.closed {
			return nil, errors.New("register: closed")
		}
		if c.conn != nil { // of a call beside this one
			c.conn.users++
			return c.conn, nil
		}
		c.next = addrs
	}
	addr := c.next[0]
	c.next = c.next[1:]
	client, closer, err := c.cfg.Dial(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("registrar %s: %w", addr, err)
	}
	c.conn = &conn{addr: addr, client: client, closer: closer, users: 1}
	return c.conn, nil
}

// give ends a use; leave: the next call tries another registrar.
func (c *Caller) give(k *conn, leave bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k.users--
	if leave || k.left {
		c.leaveLocked(k)
	}
}

func (c *Caller) leaveLocked(k *conn) {
	k.left = true
	if c.conn == k {
		c.conn = nil
	}
	if k.users == 0 && k.closer != nil {
		_ = k.closer.Close() // of a connection that is of no use any more
		k.closer = nil
	}
}
