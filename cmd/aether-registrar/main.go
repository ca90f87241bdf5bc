// Command aether-registrar takes endpoints from nodes and tells every node what
// changes. Any number of replicas serve over one store.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"aether/controlplane/etcd"
	"aether/controlplane/kube"
	"aether/controlplane/kubestore"
	"aether/controlplane/registrar/server"
	"aether/controlplane/registrar/services"
	"aether/controlplane/registry"
	"aether/dataplane/model"
	"aether/dataplane/plain"
	"aether/dataplane/telemetry"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/files"
	"aether/mtls/spiffeid"
)

type options struct {
	store                            string
	endpoints                        []string
	etcdCA, etcdCert, etcdKey        string
	etcdUser, etcdPasswordFile       string
	region, cluster                  string
	listen, adminAddr                string
	insecure                         bool
	domain, trustDomain              string
	certs, devCA, namespace, account string
	writers, identities              []string
	drain                            time.Duration
	kubeconfig, services, identity   string
	logLevel, logFormat              string
}

func main() {
	var o options
	// The first signal leaves; the second ends at once, as it would without us.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	if err := command(&o).ExecuteContext(ctx); err != nil {
		fmt.Fprintln(plain.NewWriter(os.Stderr), "aether-registrar:", err)
		os.Exit(1)
	}
}

func command(o *options) *cobra.Command {
	c := &cobra.Command{
		Use:   "aether-registrar",
		Short: "The registrar of the mesh: endpoints in, watch streams out",
		Long: `aether-registrar takes the endpoints that nodes register, keeps them in a store, and
tells all nodes what changes. Any number of replicas may run over one store; all serve.
With --store kubernetes it registers nothing: rows are what the cluster's pods say.

Where it knows a cluster (--kubeconfig, or the pod it runs in), one replica keeps the
Services of the mesh there: one for each service, with the ports that its pods declare.

SIGTERM sends the watching nodes elsewhere over --drain-time, writes what the store is
still owed, and ends. A second SIGTERM ends at once.`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), *o) },
	}
	f := c.Flags()
	f.StringVar(&o.store, "store", "etcd", "where rows are kept: etcd, or kubernetes (derived from pods)")
	f.StringSliceVar(&o.endpoints, "etcd-endpoints", nil, "URLs of etcd's members, as https://etcd-0:2379")
	f.StringVar(&o.etcdCA, "etcd-ca", "", "PEM file of the authorities that etcd's certificates are verified by; default the system's")
	f.StringVar(&o.etcdCert, "etcd-cert", "", "PEM file of the certificate that is shown to etcd")
	f.StringVar(&o.etcdKey, "etcd-key", "", "PEM file of its key")
	f.StringVar(&o.etcdUser, "etcd-user", "", "user of etcd's own authentication")
	f.StringVar(&o.etcdPasswordFile, "etcd-password-file", "", "file with that user's password; etcd is then spoken to over TLS, but on the loopback")
	f.StringVar(&o.region, "region", "local", "region of this mesh: part of the store's keys")
	f.StringVar(&o.cluster, "cluster", "local", "cluster of this mesh: part of the store's keys")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "file that says where the cluster's API server is; default the pod's own ServiceAccount")
	f.StringVar(&o.services, "services", "auto", "keep generated Services in the cluster: auto (where a cluster is known), on or off")
	f.StringVar(&o.identity, "identity", "", "name of this replica when replicas choose who keeps the Services; default the host's name")
	f.StringVar(&o.listen, "listen", ":8443", "address of the gRPC service")
	f.StringVar(&o.adminAddr, "admin", "127.0.0.1:9902", "address of the admin: /healthz, /readyz, /status, /metrics, /debug/pprof; empty: none")
	f.BoolVar(&o.insecure, "insecure", false, "serve without TLS: whoever can connect may change every row. Only on a loopback address")
	f.StringVar(&o.domain, "mesh-domain", model.DefaultDomain, "domain of mesh names")
	f.StringVar(&o.trustDomain, "trust-domain", "", "SPIFFE trust domain; default the mesh domain")
	f.StringVar(&o.certs, "certs", "", "directory of <namespace>/<account>/{svid.pem,svid_key.pem,svid_bundle.pem}")
	f.StringVar(&o.devCA, "dev-ca", "", "directory of a throw-away CA instead of --certs: for trials, never for production")
	f.StringVar(&o.namespace, "namespace", "aether-system", "namespace of this registrar, for its own identity")
	f.StringVar(&o.account, "service-account", "aether-registrar", "ServiceAccount of this registrar, for its own identity")
	f.StringSliceVar(&o.writers, "writer", []string{"/ns/aether-system/sa/aether-agent"},
		"SPIFFE IDs that may register and unregister endpoints, or their paths in the trust domain; everybody in it may watch. \"{node}\" stands for a node's name: whoever has such an identity, as of /node/{node}, may write that node's rows alone. \"*\": everybody may write, too")
	f.StringSliceVar(&o.identities, "allow-spiffe-id", nil,
		"SPIFFE IDs that a pod's row may name (aether.io/spiffe-id), or their paths in the trust domain, beside /ns/{namespace}/*, those of its own namespace. \"/*\" at the end: all below")
	f.DurationVar(&o.drain, "drain-time", 5*time.Second, "over which watching nodes are sent elsewhere after SIGTERM")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "of the log on stderr: text or json")
	return c
}

// run serves until ctx ends.
func run(ctx context.Context, o options) error {
	if o.trustDomain == "" {
		o.trustDomain = o.domain
	}
	log, err := logger(o)
	if err != nil {
		return err
	}
	if o.drain < 0 {
		return fmt.Errorf("--drain-time: %s is negative; 0 sends all away at once", o.drain)
	}
	for _, form := range o.identities {
		if err := registry.CheckIdentityForm(form); err != nil {
			return fmt.Errorf("--allow-spiffe-id: %w", err)
		}
	}
	store, end, err := openStore(o, log)
	if err != nil {
		return err
	}
	defer end()
	return serve(ctx, o, store, log, nil)
}

func logger(o options) (*slog.Logger, error) {
	level := new(slog.LevelVar)
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return nil, fmt.Errorf("--log-level: %w", err)
	}
	switch how := (&slog.HandlerOptions{Level: level}); o.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(plain.NewWriter(os.Stderr), how)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(plain.NewWriter(os.Stderr), how)), nil
	}
	return nil, fmt.Errorf("--log-format: %q is neither text nor json", o.logFormat)
}

// backend is a store and what it is to the server.
type backend struct {
	registry.Store
	derived  bool                     // it makes its rows itself
	register func(*telemetry.Metrics) // makes its counters known; nil: it has none
}

func openStore(o options, log *slog.Logger) (b backend, end func(), err error) {
	switch o.store {
	case "etcd":
	case "kubernetes":
		if len(o.endpoints) > 0 {
			return b, nil, errors.New("--store kubernetes excludes --etcd-endpoints")
		}
		client, err := kube.Client(o.kubeconfig)
		if err != nil {
			return b, nil, fmt.Errorf("--store kubernetes: %w", err)
		}
		s, err := kubestore.New(kubestore.Config{Client: client, Region: o.region, Cluster: o.cluster, Log: log})
		if err != nil {
			return b, nil, err
		}
		return backend{Store: s, derived: true, register: s.Register}, func() {}, nil
	default:
		return b, nil, fmt.Errorf("--store: %q is neither etcd nor kubernetes", o.store)
	}
	if len(o.endpoints) == 0 {
		return b, nil, errors.New("--etcd-endpoints is required (see --help)")
	}
	c := etcd.Config{Endpoints: o.endpoints, Region: o.region, Cluster: o.cluster, User: o.etcdUser, Log: log}
	if (o.etcdUser == "") != (o.etcdPasswordFile == "") {
		return b, nil, errors.New("--etcd-user and --etcd-password-file come together")
	}
	if o.etcdPasswordFile != "" {
		password, err := os.ReadFile(o.etcdPasswordFile)
		if err != nil {
			return b, nil, fmt.Errorf("--etcd-password-file: %w", err)
		}
		c.Password = strings.TrimRight(string(password), "\r\n")
	}
	if (o.etcdCert == "") != (o.etcdKey == "") {
		return b, nil, errors.New("--etcd-cert and --etcd-key come together")
	}
	if o.etcdCA != "" || o.etcdCert != "" {
		if c.TLS, err = etcd.TLSFiles(o.etcdCA, o.etcdCert, o.etcdKey); err != nil {
			return b, nil, err
		}
	}
	s, err := etcd.New(c)
	if err != nil {
		return b, nil, err
	}
	counted := func(m *telemetry.Metrics) {
		m.Count("aether_registrar_sync_lists_total", "Whole lists of the store's rows.", &s.Lists)
		m.Count("aether_registrar_sync_breaks_total", "Times that the store's watch broke off.", &s.Breaks)
		m.Count("aether_registrar_sync_withheld_total", "Removals held back because the store had lost rows.", &s.Withheld)
		for why, n := range s.Skipped {
			m.Count("aether_registrar_sync_skipped_total", "Keys and rows of the store that were left out, by what is wrong with them.", n, "reason", string(why))
		}
	}
	return backend{Store: s, register: counted}, func() {
		if err := s.Close(); err != nil {
			log.Warn("the store's connections did not close", "err", err)
		}
	}, nil
}

// generator keeps the Services of the cluster, or is nil where none is to be kept.
func generator(o options, rows services.Source, log *slog.Logger) (*services.Generator, error) {
	switch o.services {
	case "off":
		return nil, nil
	case "auto":
		if o.kubeconfig == "" && os.Getenv("KUBERNETES_SERVICE_HOST") == "" {
			return nil, nil
		}
	case "on":
	default:
		return nil, fmt.Errorf("--services: %q is none of auto, on and off", o.services)
	}
	client, err := kube.Client(o.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--services %s: %w; or give --services off", o.services, err)
	}
	identity := o.identity
	if identity == "" {
		if identity, err = os.Hostname(); err != nil {
			return nil, fmt.Errorf("--identity: %w", err)
		}
	}
	return services.New(services.Config{Client: client, Rows: rows, Identity: identity, Namespace: o.namespace, Log: log})
}

// serve runs everything over a store until ctx ends. listening, if not nil, is told
// the addresses once they are open; the admin's is nil if there is none.
func serve(ctx context.Context, o options, store backend, log *slog.Logger, listening func(rpc, admin net.Addr)) error {
	svid := func() *mtls.SVID { return nil }
	var certs *mtls.Store
	cfg := server.Config{Store: store.Store, Derived: store.derived, Region: o.region, Cluster: o.cluster, Drain: o.drain, TrustDomain: o.trustDomain, Identities: o.identities, Log: log}
	if o.drain == 0 {
		cfg.Drain = -1
	}
	if o.insecure {
		if err := loopback(o.listen); err != nil {
			return err
		}
		if o.certs != "" || o.devCA != "" {
			return errors.New("--insecure excludes --certs and --dev-ca")
		}
		log.Warn("NO TLS: whoever can connect may change every row; not for production", "listen", o.listen)
	} else {
		var err error
		if certs, svid, err = identity(o, log); err != nil {
			return err
		}
		cfg.TLS = mtls.ServerConfig(mtls.Server{Pod: "aether-registrar", SVID: svid, Named: true})
		if cfg.Writer, cfg.Node, err = writer(o); err != nil {
			return err
		}
	}
	s := server.New(cfg)
	metrics := telemetry.New(telemetry.Config{Bare: true})
	s.Register(metrics)
	if store.register != nil {
		store.register(metrics)
	}
	kept, err := generator(o, s, log)
	if err != nil {
		return err
	}
	if kept != nil {
		kept.Register(metrics)
	}

	var open net.ListenConfig
	ln, err := open.Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	var adminLn net.Listener
	var adminAddr net.Addr
	if o.adminAddr != "" {
		if adminLn, err = open.Listen(ctx, "tcp", o.adminAddr); err != nil {
			ln.Close()
			return fmt.Errorf("--admin: %w", err)
		}
		adminAddr = adminLn.Addr()
	}
	if listening != nil {
		listening(ln.Addr(), adminAddr)
	}

	// What serves ends first, and then what it stands on.
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	under, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	var wg sync.WaitGroup
	errs := make(chan error, 4)
	start := func(name string, f func() error) {
		wg.Go(func() {
			if err := f(); err != nil {
				errs <- fmt.Errorf("%s: %w", name, err)
			}
			leave() // whatever ends, all end
		})
	}
	if certs != nil {
		start("identity", func() error { return certs.Run(under) })
	}
	if adminLn != nil {
		a := &admin{server: s, metrics: metrics.Handler(), certified: func() bool { return o.insecure || svid() != nil }}
		start("admin", func() error { return a.run(under, adminLn) })
	}
	if kept != nil {
		start("services", func() error {
			if err := kept.Run(ctx); ctx.Err() == nil {
				return err
			}
			return nil
		})
	}
	log.Info("aether-registrar", "store", o.store, "region", o.region, "cluster", o.cluster, "listen", ln.Addr().String(), "trust-domain", o.trustDomain, "admin", o.adminAddr, "services", kept != nil)
	err = s.Run(ctx, ln)
	end()
	wg.Wait()
	close(errs)
	all := []error{err}
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// identity is where the registrar's own certificate comes from, and the current one.
func identity(o options, log *slog.Logger) (*mtls.Store, func() *mtls.SVID, error) {
	id, err := spiffeid.ForServiceAccount(o.trustDomain, o.namespace, o.account)
	if err != nil {
		return nil, nil, fmt.Errorf("--trust-domain, --namespace, --service-account: %w", err)
	}
	var source mtls.Source
	switch {
	case o.certs != "" && o.devCA != "":
		return nil, nil, errors.New("--certs and --dev-ca exclude each other")
	case o.certs != "":
		source = files.New(files.Config{Dir: o.certs})
	case o.devCA != "":
		ca, err := devca.Open(o.devCA, o.trustDomain, nil)
		if err != nil {
			return nil, nil, err
		}
		log.Warn("THROW-AWAY CA in use: identities prove nothing; not for production", "dir", o.devCA)
		source = ca.Source(0)
	default:
		return nil, nil, errors.New("no identity: give --certs (files that something keeps fresh) or, for a trial, --dev-ca or --insecure")
	}
	const self = "registrar"
	store := mtls.NewStore(mtls.Config{Source: source, Changed: func(_ mtls.Ref, s *mtls.SVID, err error) {
		if err != nil {
			log.Warn("own certificate", "err", err)
		} else {
			log.Info("own certificate", "identity", s.ID.String(), "until", s.NotAfter)
		}
	}})
	store.Add(mtls.Ref{Container: self, Namespace: o.namespace, Account: o.account, ID: id})
	return store, func() *mtls.SVID { return store.Current(self) }, nil
}

// writer says who may change rows, and which node's alone. nil: everybody, any.
func writer(o options) (may func(spiffeid.ID) bool, node func(spiffeid.ID) string, err error) {
	any := map[spiffeid.ID]bool{}
	var forms []string
	all := false
	for _, w := range o.writers {
		if w == "*" {
			all = true
			continue
		}
		if registry.NamesNode(w) {
			if err := registry.CheckNodeForm(w); err != nil {
				return nil, nil, fmt.Errorf("--writer: %w", err)
			}
			forms = append(forms, w)
			continue
		}
		if strings.HasPrefix(w, "/") {
			w = "spiffe://" + o.trustDomain + w
		}
		id, err := spiffeid.Parse(w)
		if err != nil {
			return nil, nil, fmt.Errorf("--writer: %q is neither a SPIFFE ID nor the path of one (/ns/<namespace>/sa/<account>): %w", w, err)
		}
		any[id] = true
	}
	node = func(id spiffeid.ID) string {
		if any[id] {
			return ""
		}
		for _, form := range forms {
			if node, ok := registry.NodeOf(id, o.trustDomain, form); ok {
				return node
			}
		}
		return ""
	}
	if all {
		return nil, node, nil
	}
	return func(id spiffeid.ID) bool { return any[id] || node(id) != "" }, node, nil
}

// loopback says why an address may not be served without TLS.
func loopback(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
		return fmt.Errorf("--insecure: %q is no loopback address: give --listen 127.0.0.1:8443, or leave --insecure out", addr)
	}
	return nil
}
