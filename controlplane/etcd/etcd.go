// Package etcd keeps the mesh's rows in etcd (contract 9.5): it is a registry.Store.
//
//   - The layout is registry.Key's and frozen. Rows are written below the own partition
//     only, and read from all of them.
//   - What is heard is the store's history: a list, and every change after it. Where that
//     breaks off it is listed again; nothing is guessed.
//   - A store that has lost rows it had (emptied, set back, another one) takes none away
//     at once: they are kept for a grace, loudly (decision 020).
//   - What cannot be read is counted by its fault, named in the log once, and left out.
//
// It knows nothing of who reads or writes the rows.
package etcd

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
)

// Bounds of what is asked of etcd and waited for.
const (
	// requestTimeout is for one request: a page of the list, a write, a token.
	requestTimeout = 5 * time.Second
	// maxMessage is the largest answer, in bytes, that is taken.
	maxMessage = 64 << 20
	// pageRows is how many keys are asked for at once; fewer where they are large. etcd
	// walks over all that are left for each page, so that small ones cost more.
	pageRows = 10_000
	// maxProtocols is how many protocol directories of a service are looked into.
	maxProtocols = 16
	// pingEvery and pingTimeout find a server that is gone without a word. etcd
	// refuses pings that come more often than every 5 s.
	pingEvery   = 10 * time.Second
	pingTimeout = 5 * time.Second
	// redialMax is the longest pause between two attempts at one server's connection.
	redialMax = 5 * time.Second
	// defaultGrace is how long rows are kept that a store has lost; as long as a
	// service is kept whose rows vanished (contract 4.12).
	defaultGrace = 90 * time.Second
)

// Config of a Store. Every field but Endpoints may be left zero.
type Config struct {
	Endpoints []string // URLs of the cluster's members: "https://etcd-0:2379"; required

	Region, Cluster string // the partition that is written to; empty: "local"

	TLS            *tls.Config // nil: as the endpoints' scheme says, with the system's roots
	User, Password string      // empty: no authentication by password

	Grace time.Duration // how long rows are kept that the store has lost; 0: 90 s; negative: not at all
	Log   *slog.Logger  // nil: discard
}

// Store is a registry.Store in etcd. Make it with New and end it with Close. Safe for
// concurrent use; Watch runs once at a time.
type Store struct {
	// Skipped are keys and values that were left out, by fault, each time that they
	// were read. The map does not change.
	Skipped map[registry.Fault]*telemetry.Counter
	// Lists are whole lists that were read, Breaks the times that the watch broke off.
	Lists, Breaks telemetry.Counter
	// Withheld are removals that were held back, because the store had lost rows.
	Withheld telemetry.Counter

	cfg   Config
	log   *slog.Logger
	named names
	pause func(failures int) time.Duration // before the store is tried again

	progress progress

	lock   chan struct{} // held by whoever makes or takes the client
	client *clientv3.Client
	closed bool
}

var (
	_ registry.Store      = (*Store)(nil)
	_ registry.Positioned = (*Store)(nil)
)

// New makes a store. It connects to nothing yet.
func New(cfg Config) (*Store, error) {
	cfg.Region, cfg.Cluster = cmp.Or(cfg.Region, registry.DefaultPartition), cmp.Or(cfg.Cluster, registry.DefaultPartition)
	cfg.Grace = cmp.Or(cfg.Grace, defaultGrace)
	if _, err := registry.ServiceDir(cfg.Region, cfg.Cluster, model.ServiceName{Namespace: "x", Name: "x"}); err != nil {
		return nil, fmt.Errorf("etcd: the partition to write to: %w", err)
	}
	if len(cfg.Endpoints) == 0 {
		return nil, errors.New("etcd: no endpoint: name the URLs of the cluster's members, as https://etcd-0:2379")
	}
	for _, e := range cfg.Endpoints {
		switch {
		case strings.HasPrefix(e, "https://") && len(e) > len("https://"):
		case strings.HasPrefix(e, "http://") && len(e) > len("http://"):
			if cfg.TLS != nil { // the client would leave TLS out without a word
				return nil, fmt.Errorf("etcd: endpoint %s is without TLS, which is configured: write https", e)
			}
			if cfg.Password != "" && !onLoopback(e) {
				return nil, fmt.Errorf("etcd: endpoint %s is without TLS, and whoever is on the way would read the password: write https, or an address of the loopback", e)
			}
		default:
			return nil, fmt.Errorf("etcd: endpoint %q is no URL: write https://<host>:<port>, or http:// for one without TLS", e)
		}
	}
	if (cfg.User == "") != (cfg.Password == "") { // nor would it use half of them
		return nil, errors.New("etcd: user and password come together")
	}
	s := &Store{
		Skipped: map[registry.Fault]*telemetry.Counter{}, cfg: cfg, log: cmp.Or(cfg.Log, slog.New(slog.DiscardHandler)),
		pause: retryPause, lock: make(chan struct{}, 1),
	}
	for _, f := range registry.Faults() {
		s.Skipped[f] = new(telemetry.Counter)
	}
	return s, nil
}

// onLoopback reports whether an endpoint's URL leads to this machine itself.
func onLoopback(endpoint string) bool {
	u, err := url.Parse(endpoint)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(u.Hostname())
	return u.Hostname() == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// TLSFiles is a client's configuration for etcd: PEM files of the authorities that
// servers are verified by, and of the own certificate and key, which are read again for
// each connection, so that they may be renewed. cert and key may both be empty.
func TLSFiles(ca, cert, key string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		b, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("etcd: authorities: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(b) {
			return nil, fmt.Errorf("etcd: no certificate in %s: it must hold the authorities, in PEM", ca)
		}
	}
	if cert == "" && key == "" {
		return c, nil
	}
	load := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("etcd: own certificate: %w", err)
		}
		return &pair, nil
	}
	if _, err := load(); err != nil {
		return nil, err
	}
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	return c, nil
}

// Close ends the connections. What is under way fails.
func (s *Store) Close() error {
	s.lock <- struct{}{}
	defer func() { <-s.lock }()
	s.closed = true
	if s.client == nil {
		return nil
	}
	err := s.client.Close()
	s.client = nil
	if err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("etcd: close: %w", err)
	}
	return nil
}

// conn is the client, made when it is first needed: with a password, making one asks the server.
func (s *Store) conn(ctx context.Context) (*clientv3.Client, error) {
	select {
	case s.lock <- struct{}{}:
		defer func() { <-s.lock }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	switch {
	case s.closed:
		return nil, errors.New("the store is closed")
	case s.client != nil:
		return s.client, nil
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints: s.cfg.Endpoints, TLS: s.cfg.TLS, Username: s.cfg.User, Password: s.cfg.Password,
		DialTimeout: requestTimeout, DialKeepAliveTime: pingEvery, DialKeepAliveTimeout: pingTimeout, MaxCallRecvMsgSize: maxMessage,
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: redialMax}, MinConnectTimeout: requestTimeout,
		})},
		Logger: zap.NewNop(), // what matters of it is in the errors
	})
	if err != nil {
		return nil, err
	}
	s.client = c
	return c, nil
}

// Put writes a valid row under every class that it serves, and takes it from the
// others, in one transaction, unless what is there was said later.
func (s *Store) Put(ctx context.Context, service model.ServiceName, e *registrypb.ServiceEndpoint) error {
	if err := s.put(ctx, service, e); err != nil {
		return fmt.Errorf("etcd: put row %s of %s: %w", e.GetIp(), service, err)
	}
	return nil
}

func (s *Store) put(ctx context.Context, service model.ServiceName, e *registrypb.ServiceEndpoint) error {
	if _, why := registry.RowFault(e); why != "" {
		return fmt.Errorf("%w: %s", registry.ErrUnfit, why)
	}
	serves := registry.Protocols(e)
	if len(serves) == 0 {
		return fmt.Errorf("%w: it serves no class that this version knows", registry.ErrUnfit)
	}
	value, err := proto.Marshal(e)
	if err != nil {
		return fmt.Errorf("%w: %w", registry.ErrUnfit, err)
	}
	said := registry.StatementOf(e)
	var all []string
	var ops []clientv3.Op
	for p := registrypb.Service_PROTOCOL_HTTP; p <= registrypb.Service_PROTOCOL_UDP; p++ {
		key, err := registry.Key{Kind: registry.EndpointKey, Region: s.cfg.Region, Cluster: s.cfg.Cluster, Service: service, Protocol: p, IP: e.GetIp()}.Text()
		if err != nil {
			return fmt.Errorf("%w: %w", registry.ErrUnfit, err)
		}
		all = append(all, key)
		if slices.Contains(serves, p) {
			ops = append(ops, clientv3.OpPut(key, string(value)))
		} else {
			ops = append(ops, clientv3.OpDelete(key))
		}
	}
	err = s.replace(ctx, all, ops, said, registry.Statement.Outdates)
	if errors.Is(err, rpctypes.ErrRequestTooLarge) { // etcd's --max-request-bytes
		return fmt.Errorf("%w: %w", registry.ErrUnfit, err)
	}
	return err
}

// Delete takes a pod's row from every protocol directory that the service has, those
// among them that this version does not know, in one transaction.
func (s *Store) Delete(ctx context.Context, service model.ServiceName, ip string, by registry.Statement) error {
	if err := s.remove(ctx, service, ip, by); err != nil {
		return fmt.Errorf("etcd: delete row %.64q of %s: %w", ip, service, err)
	}
	return nil
}

func (s *Store) remove(ctx context.Context, service model.ServiceName, ip string, by registry.Statement) error {
	if ip == "" || strings.Contains(ip, "/") {
		return fmt.Errorf("%w: that is no address", registry.ErrUnfit)
	}
	dir, err := registry.ServiceDir(s.cfg.Region, s.cfg.Cluster, service)
	if err != nil {
		return fmt.Errorf("%w: %w", registry.ErrUnfit, err)
	}
	dirs, err := s.below(ctx, dir)
	if err != nil {
		return err
	}
	var keys []string
	var ops []clientv3.Op
	for _, p := range dirs {
		keys = append(keys, dir+p+"/endpoints/"+ip)
		ops = append(ops, clientv3.OpDelete(dir+p+"/endpoints/"+ip))
	}
	if len(ops) == 0 {
		return nil
	}
	return s.replace(ctx, keys, ops, by, registry.Statement.Keeps)
}

// below are the names that stand next below a directory, at most maxProtocols of them,
// found by as many short reads: the directory itself may be large.
func (s *Store) below(ctx context.Context, dir string) (found []string, err error) {
	c, err := s.conn(ctx)
	if err != nil {
		return nil, err
	}
	for from := dir; len(found) < maxProtocols; {
		r, err := s.get(ctx, c, from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(dir)), clientv3.WithLimit(1), clientv3.WithKeysOnly())
		if err != nil {
			return nil, err
		}
		if len(r.Kvs) == 0 {
			return found, nil
		}
		key := string(r.Kvs[0].Key)
		name, _, isDir := strings.Cut(key[len(dir):], "/")
		if !isDir {
			from = key + "\x00"
			continue
		}
		found = append(found, name)
		from = dir + name + "0" // the first that is behind all of name + "/"
	}
	return found, nil
}

func (s *Store) get(ctx context.Context, c *clientv3.Client, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return c.Get(ctx, key, opts...)
}

// replace does ops, unless what stands under one of the keys is there to stay whatever
// said replaces it. Between the look at the keys and the writing nobody else writes them:
// the first transaction takes them to be free, and each further one to be as the one before
// it found them.
func (s *Store) replace(ctx context.Context, keys []string, ops []clientv3.Op, said registry.Statement, stays func(there, said registry.Statement) bool) error {
	c, err := s.conn(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	found := make([]*mvccpb.KeyValue, len(keys)) // nil: nothing is there
	look := make([]clientv3.Op, len(keys))
	for i, key := range keys {
		look[i] = clientv3.OpGet(key)
	}
	for { // until ctx ends
		as := make([]clientv3.Cmp, len(keys))
		for i, key := range keys {
			as[i] = clientv3.Compare(clientv3.ModRevision(key), "=", found[i].GetModRevision())
		}
		r, err := c.Txn(ctx).If(as...).Then(ops...).Else(look...).Commit()
		if err != nil {
			return err
		}
		if r.Succeeded {
			s.progress.wrote(r.Header.GetRevision())
			return nil
		}
		late := int64(0)
		for i, a := range r.Responses {
			found[i] = nil
			for _, kv := range a.GetResponseRange().GetKvs() {
				found[i] = kv
				e := &registrypb.ServiceEndpoint{}
				if proto.Unmarshal(kv.Value, e) == nil && stays(registry.StatementOf(e), said) { // what cannot be read says nothing
					late = max(late, kv.ModRevision)
				}
			}
		}
		if late > 0 {
			s.progress.wrote(late)
			return registry.ErrOutdated
		}
	}
}

// Position is registry.Positioned's.
func (s *Store) Position() registry.Position {
	s.progress.mu.Lock()
	defer s.progress.mu.Unlock()
	return registry.Position{Watch: s.progress.lists, Revision: s.progress.written}
}

// Shown is registry.Positioned's. A write that changed nothing is shown with what
// changes next.
func (s *Store) Shown(p registry.Position) bool {
	s.progress.mu.Lock()
	defer s.progress.mu.Unlock()
	return p.Watch != s.progress.lists || p.Revision <= s.progress.heard
}

// progress is how far the own writes are, and the watch.
type progress struct {
	mu             sync.Mutex
	lists          int64
	written, heard int64 // revisions, since the last list
}

func (p *progress) wrote(revision int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written = max(p.written, revision)
}

func (p *progress) hears(revision int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard = max(p.heard, revision)
}

// listed begins anew: the history may be another one.
func (p *progress) listed(revision int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lists++
	p.written, p.heard = 0, revision
}

// Configs are what clusters export of their services' routes. Origin and service are
// those of the key, never the value's own.
func (s *Store) Configs(ctx context.Context) ([]*registrypb.ServiceConfigProjection, error) {
	out, err := s.configs(ctx)
	if err != nil {
		return nil, fmt.Errorf("etcd: list configs: %w", err)
	}
	return out, nil
}

func (s *Store) configs(ctx context.Context) (out []*registrypb.ServiceConfigProjection, err error) {
	c, err := s.conn(ctx)
	if err != nil {
		return nil, err
	}
	at := registry.Root
	for end := clientv3.GetPrefixRangeEnd(registry.Root); ; {
		// The next key says which partition is next; of it only config/ is read.
		r, err := s.get(ctx, c, at, clientv3.WithRange(end), clientv3.WithLimit(1), clientv3.WithKeysOnly())
		if err != nil || len(r.Kvs) == 0 {
			return out, err
		}
		key := string(r.Kvs[0].Key)
		parts := strings.SplitN(key[len(registry.Root):], "/", 4)
		if len(parts) < 4 || parts[1] != "clusters" {
			at = key + "\x00"
			continue
		}
		dir := registry.Root + parts[0] + "/clusters/" + parts[2] + "/"
		if _, err := s.pages(ctx, c, dir+"config/", func(k, v []byte) { out = append(out, s.config(k, v)...) }); err != nil {
			return nil, err
		}
		at = strings.TrimSuffix(dir, "/") + "0"
	}
}

// config reads one projection, or none.
func (s *Store) config(key, value []byte) []*registrypb.ServiceConfigProjection {
	k, err := registry.ParseKey(key)
	if err != nil {
		s.skip(registry.BadKey, key, err.Error())
		return nil
	}
	p := &registrypb.ServiceConfigProjection{}
	if err := proto.Unmarshal(value, p); err != nil {
		s.skip(registry.BadValue, key, "its bytes are no ServiceConfigProjection: "+err.Error())
		return nil
	}
	p.OriginCluster, p.Service = k.Cluster, k.Service.String()
	return []*registrypb.ServiceConfigProjection{p}
}
