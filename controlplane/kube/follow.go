package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"aether/controlplane/gamma"
	"aether/controlplane/kube/follow"
)

const (
	labelService = discoveryv1.LabelServiceName
	protobuf     = "application/vnd.kubernetes.protobuf"
	kindCRD      = "CustomResourceDefinition"
)

// served is a kind that an API server may have.
type served struct {
	kind     string
	group    string
	resource string
	versions []string // the first that the server has is read
	crd      string   // the name of its CustomResourceDefinition; empty: it is built in
}

var kinds = []served{
	{gamma.KindService, "", "services", []string{"v1"}, ""},
	custom(gamma.KindHTTPRoute, gamma.GatewayGroup, "httproutes", "v1", "v1beta1"),
	custom(gamma.KindGRPCRoute, gamma.GatewayGroup, "grpcroutes", "v1", "v1alpha2"),
	custom(gamma.KindTCPRoute, gamma.GatewayGroup, "tcproutes", "v1", "v1alpha2"),
	custom(gamma.KindTLSRoute, gamma.GatewayGroup, "tlsroutes", "v1", "v1alpha3", "v1alpha2"),
	custom(gamma.KindUDPRoute, gamma.GatewayGroup, "udproutes", "v1", "v1alpha2"),
	custom(gamma.KindReferenceGrant, gamma.GatewayGroup, "referencegrants", "v1", "v1beta1"),
	custom(gamma.KindHTTPFilter, gamma.ConfigGroup, "httpfilters", "v1"),
	custom(gamma.KindEndpointPolicy, gamma.ConfigGroup, "endpointpolicies", "v1"),
	custom(gamma.KindMeshConfig, gamma.ConfigGroup, "meshconfigs", "v1"),
}

func custom(kind, group, resource string, versions ...string) served {
	return served{kind, group, resource, versions, resource + "." + group}
}

var crdResource = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// connect makes the clients. None of them talks to the server yet.
func (s *Source) connect(given *rest.Config) (err error) {
	c := client(given)
	if s.objects, err = dynamic.NewForConfig(c); err != nil {
		return err
	}
	if s.names, err = metadata.NewForConfig(c); err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	if err := corev1.AddToScheme(scheme); err != nil {
		return err
	}
	if err := discoveryv1.AddToScheme(scheme); err != nil {
		return err
	}
	if s.core, err = typed(c, scheme, "/api", corev1.SchemeGroupVersion); err != nil {
		return err
	}
	s.slicer, err = typed(c, scheme, "/apis", discoveryv1.SchemeGroupVersion)
	return err
}

// client is a configuration for requests of our own.
func client(given *rest.Config) *rest.Config {
	c := rest.CopyConfig(given)
	// One client of few long requests: it throttles itself by retryMax, and the server by
	// its own priorities.
	c.QPS = -1
	c.UserAgent = "aether-proxy"
	return c
}

// typed makes a client for the built-in objects of a group, in protobuf.
func typed(c *rest.Config, scheme *runtime.Scheme, path string, gv schema.GroupVersion) (*rest.RESTClient, error) {
	c = rest.CopyConfig(c)
	c.APIPath, c.GroupVersion = path, &gv
	c.ContentType, c.AcceptContentTypes = protobuf, protobuf+",application/json"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(c)
}

// follow lists and watches a kind until ctx ends.
func (s *Source) follow(ctx context.Context, k *kind) {
	for delay := retryMin; ctx.Err() == nil; {
		var err error
		listed := false
		for _, v := range k.versions {
			// A version that the server does not have is not found; which others it
			// has only trying tells.
			if err = s.list(ctx, k, v, func() { listed = true }); listed || !apierrors.IsNotFound(err) {
				break
			}
		}
		if ctx.Err() != nil {
			return
		}
		if listed {
			delay = retryMin
		}
		wait := delay
		switch {
		case err == nil: // the watch ended: list again, soon
		case apierrors.IsNotFound(err):
			inert, told, why := s.deactivate(k)
			switch {
			case !inert:
				s.setStatus(k, errors.Join(err, why))
			case told: // when the CRD comes
				wait, delay = 0, retryMin
			}
		default:
			s.setStatus(k, err)
		}
		if !waitRetry(ctx, wait, k.retry) {
			return
		}
		delay = min(2*delay, retryMax)
	}
}

// deactivate lets a kind be inert that is not found: if its CRD is seen to be missing, or if that
// cannot be seen and nothing is lost by it; and if its CRD is there with none of the versions
// that are read, but for kinds without which access would be wider. told: its coming will be
// heard of. why says what else is to be said of a kind that is not inert.
func (s *Source) deactivate(k *kind) (inert, told bool, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	installed, known := s.installedLocked(k)
	switch {
	case !installed && (known || s.crdsRead && !k.listed):
		k.misses = 0
		s.deactivateLocked(k, "")
		return true, known, nil
	case !installed || !known || k.listed:
		return false, false, nil
	}
	// A CRD is there before its objects are served.
	if k.misses++; k.misses < unreadTries {
		return false, false, nil
	}
	versions := strings.Join(k.versions, ", ")
	if s.policyLocked(k) {
		return false, false, fmt.Errorf("its CRD is installed without a version that this program reads (%s), and a policy may be among its objects: nothing is published before they can be read; have it serve one of these, or remove it", versions)
	}
	s.deactivateLocked(k, fmt.Sprintf("is installed without a version that this program reads (%s): its objects do nothing until it serves one of these", versions))
	return true, false, nil
}

// restLocked: the kind is inert; why is a problem of its CRD, if that is one.
func (s *Source) deactivateLocked(k *kind, why string) {
	if !k.inactive {
		s.log.Warn("kubernetes: a kind is not installed, or in no version that is read, and does nothing until it is", "kind", k.kind, "crd", k.crd)
	}
	k.inactive, k.listed, k.version, k.err = true, false, "", ""
	s.state.Clear(k.kind)
	s.state.Say(gamma.Label(kindCRD, "", k.crd), why)
	s.selectLocked()
	s.publishLocked()
	s.reportLocked()
}

// policyLocked reports whether to do without a kind may widen access: HTTPFilters, and, where
// there are any or may be, the routes that can name them.
func (s *Source) policyLocked(k *kind) bool {
	switch k.kind {
	case gamma.KindHTTPFilter:
		return true
	case gamma.KindHTTPRoute, gamma.KindGRPCRoute:
		i := slices.IndexFunc(s.kinds, func(k *kind) bool { return k.kind == gamma.KindHTTPFilter })
		return !s.kinds[i].settled() || s.state.Count(gamma.KindHTTPFilter) > 0
	}
	return false
}

// waitRetry waits, or until kicked; forever if d is 0. False: ctx ended.
func waitRetry(ctx context.Context, d time.Duration, kick <-chan struct{}) bool {
	var after <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d/2 + rand.N(d/2))
		defer t.Stop()
		after = t.C
	}
	// The end; a reason to try now; the time to.
	select {
	case <-ctx.Done():
		return false
	case <-kick:
	case <-after:
	}
	return true
}

// list lists a kind in one version, calls listed, and watches it until that is over.
func (s *Source) list(ctx context.Context, k *kind, version string, listed func()) error {
	st := &store{s: s, k: k, version: version, listed: listed}
	if k.crd == "" {
		return s.reflect(ctx, k, listWatch(s.core, k.resource, fields.Everything().String(), ""), st)
	}
	r := s.objects.Resource(schema.GroupVersionResource{Group: k.group, Version: version, Resource: k.resource})
	return s.reflect(ctx, k, &cache.ListWatch{
		ListWithContextFunc:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) },
		WatchFuncWithContext: r.Watch,
	}, st)
}

// listWatch lists and watches a built-in resource.
func listWatch(c *rest.RESTClient, resource, fields, labels string) *cache.ListWatch {
	return cache.NewFilteredListWatchFromClient(c, resource, metav1.NamespaceAll, func(o *metav1.ListOptions) {
		o.FieldSelector, o.LabelSelector = fields, labels
	})
}

// reflect runs a reflector until its watch is over, and notes how it fares.
func (s *Source) reflect(ctx context.Context, k *kind, lw *cache.ListWatch, to cache.ReflectorStore) error {
	noted := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return lw.ListWithContext(ctx, o) // whoever asked for the list hears of its failure
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := lw.WatchWithContext(ctx, o)
			if err == nil || !apierrors.IsNotFound(err) && ctx.Err() == nil {
				s.setStatus(k, err)
			}
			return w, err
		},
	}
	quiet := klog.New(nil) // fared says it, once
	return cache.NewReflectorWithOptions(noted, nil, to, cache.ReflectorOptions{
		Name: k.kind, TypeDescription: k.kind, Logger: &quiet, Clock: follow.Clock(ctx),
		Backoff: &wait.Backoff{Duration: retryMin, Factor: 2, Jitter: 1, Cap: retryMax / 2, Steps: 8}, // up to twice that
	}).ListAndWatchWithContext(klog.NewContext(ctx, quiet))
}

// store takes what a reflector hears of one kind. The objects are not kept.
type store struct {
	s       *Source
	k       *kind
	version string
	listed  func()
	then    func(*gamma.State) // after a list; nil: nothing
}

// Add is for cache.ReflectorStore.
func (t *store) Add(o any) error {
	t.s.change(func(st *gamma.State) { set(st, t.k.kind, o) })
	t.s.Events.Inc()
	return nil
}

// Update is for cache.ReflectorStore.
func (t *store) Update(o any) error { return t.Add(o) }

// Delete is for cache.ReflectorStore.
func (t *store) Delete(o any) error {
	m, err := apimeta.Accessor(o)
	if err != nil {
		return fmt.Errorf("%s that is no object: %w", t.k.kind, err)
	}
	t.s.change(func(st *gamma.State) { st.Delete(t.k.kind, m.GetNamespace(), m.GetName()) })
	t.s.Events.Inc()
	return nil
}

// Replace is for cache.ReflectorStore: items are all there are.
func (t *store) Replace(items []any, _ string) error {
	t.s.Lists.Inc()
	t.listed()
	t.s.change(func(st *gamma.State) {
		t.k.listed, t.k.inactive, t.k.version, t.k.err, t.k.misses = true, false, t.version, "", 0
		if t.k.crd != "" {
			st.Say(gamma.Label(kindCRD, "", t.k.crd), "")
		}
		replace(st, t.k.kind, items)
		if t.then != nil {
			t.then(st)
		}
	})
	t.s.setStatus(t.k, nil)
	return nil
}

// Resync is for cache.ReflectorStore.
func (t *store) Resync() error { return nil }

// Transformer is for cache.TransformingStore: a list that comes as a stream is
// collected by the reflector, cut down.
func (t *store) Transformer() cache.TransformFunc { return strip }

// replace makes items all there is of a kind.
func replace(st *gamma.State, kind string, items []any) {
	have := map[string]bool{}
	for _, o := range items {
		if m, err := apimeta.Accessor(o); err == nil {
			have[m.GetNamespace()+"/"+m.GetName()] = true
			set(st, kind, o)
		}
	}
	for _, n := range st.Names(kind) {
		if !have[n.String()] {
			st.Delete(kind, n.Namespace, n.Name)
		}
	}
}

func set(st *gamma.State, kind string, o any) {
	switch o := o.(type) {
	case *corev1.Service:
		st.SetService(o)
	case *discoveryv1.EndpointSlice:
		st.SetSlice(o)
	case *unstructured.Unstructured:
		st.Set(kind, o.Object)
	}
}

// strip takes out of an object what the mesh never looks at.
func strip(o any) (any, error) {
	switch o := o.(type) {
	case *corev1.Service:
		o.ManagedFields, o.Annotations, o.Status = nil, nil, corev1.ServiceStatus{}
	case *discoveryv1.EndpointSlice:
		o.ManagedFields, o.Annotations, o.OwnerReferences = nil, nil, nil
		if len(o.Endpoints) > 1 {
			o.Endpoints = []discoveryv1.Endpoint{{}} // that there are some is enough
		}
	case *unstructured.Unstructured:
		o.SetManagedFields(nil)
		o.SetAnnotations(nil)
		delete(o.Object, "status")
	case *metav1.PartialObjectMetadata:
		o.ObjectMeta = metav1.ObjectMeta{Name: o.Name, ResourceVersion: o.ResourceVersion}
	}
	return o, nil
}

// followSlices follows the EndpointSlices of the Services that need them (contract 4.10).
func (s *Source) followSlices(ctx context.Context) {
	for delay := retryMin; ctx.Err() == nil; {
		s.mu.Lock()
		labels := s.selected
		s.mu.Unlock()
		if labels == "" {
			s.mu.Lock()
			s.slices.listed, s.slices.err = false, ""
			s.state.Clear(gamma.KindEndpointSlice)
			s.state.SlicesUnread(gamma.NotRead)
			s.reportLocked()
			s.mu.Unlock()
			delay = retryMin
			if !waitRetry(ctx, 0, s.reselect) {
				return
			}
			continue
		}
		listed, err := false, error(nil)
		part, end := context.WithCancel(ctx)
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			err = s.reflect(part, s.slices, listWatch(s.slicer, "endpointslices", "", labels),
				&store{s: s, k: s.slices, version: "v1", listed: func() { listed = true }, then: func(st *gamma.State) { st.SlicesUnread("") }})
		}()
		again := false
		// Other Services need theirs; or the watch is over, as it is when ctx ends.
		select {
		case <-s.reselect:
			again = true
		case <-stopped:
		}
		end()
		<-stopped
		if again || ctx.Err() != nil {
			continue
		}
		if listed {
			delay = retryMin
		}
		if err != nil {
			s.setStatus(s.slices, err)
			s.change(func(st *gamma.State) {
				if !s.slices.listed {
					st.SlicesUnread(s.slices.err)
				}
			})
		}
		if !waitRetry(ctx, delay, s.reselect) {
			return
		}
		delay = min(2*delay, retryMax)
	}
}

// followCRDs follows which CustomResourceDefinitions there are, by their names alone.
func (s *Source) followCRDs(ctx context.Context) {
	r := s.names.Resource(crdResource)
	k := &kind{served: served{kind: kindCRD}}
	for delay := retryMin; ctx.Err() == nil; {
		listed := false
		err := s.reflect(ctx, k, &cache.ListWatch{
			ListWithContextFunc:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) },
			WatchFuncWithContext: r.Watch,
		}, &crdStore{s, func() { listed = true }})
		if ctx.Err() != nil {
			return
		}
		if listed {
			delay = retryMin
		}
		if err != nil {
			s.setStatus(k, err)
			s.mu.Lock()
			s.crdsErr, s.crdsRead = k.err, true
			s.reportLocked()
			s.mu.Unlock()
		}
		if !waitRetry(ctx, delay, nil) {
			return
		}
		delay = min(2*delay, retryMax)
	}
}

// crdStore takes the names of CRDs, and wakes the kinds that they are of.
type crdStore struct {
	s      *Source
	listed func()
}

func (t *crdStore) change(f func(have map[string]bool)) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	f(t.s.crds)
	t.s.crdsErr, t.s.crdsRead = "", true
	for _, k := range t.s.kinds {
		if k.crd != "" && t.s.crds[k.crd] != k.listed {
			signal(k.retry)
		}
	}
	t.s.reportLocked()
}

func (t *crdStore) one(o any, there bool) error {
	m, err := apimeta.Accessor(o)
	if err != nil {
		return fmt.Errorf("CustomResourceDefinition that is no object: %w", err)
	}
	t.change(func(have map[string]bool) {
		if delete(have, m.GetName()); there {
			have[m.GetName()] = true
		}
	})
	return nil
}

// Add is for cache.ReflectorStore.
func (t *crdStore) Add(o any) error { return t.one(o, true) }

// Update is for cache.ReflectorStore: a CRD that was there may be served only now.
func (t *crdStore) Update(o any) error { return t.one(o, true) }

// Delete is for cache.ReflectorStore.
func (t *crdStore) Delete(o any) error { return t.one(o, false) }

// Replace is for cache.ReflectorStore.
func (t *crdStore) Replace(items []any, _ string) error {
	t.listed()
	t.change(func(have map[string]bool) {
		clear(have)
		for _, o := range items {
			if m, err := apimeta.Accessor(o); err == nil {
				have[m.GetName()] = true
			}
		}
	})
	return nil
}

// Resync is for cache.ReflectorStore.
func (t *crdStore) Resync() error { return nil }

// Transformer is for cache.TransformingStore.
func (t *crdStore) Transformer() cache.TransformFunc { return strip }

// explain says what an error means for whoever has to mend it.
func explain(kind string, err error) string {
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("%v: apply the ClusterRole of this version (rbac.yaml)", err)
	case apierrors.IsUnauthorized(err):
		return fmt.Sprintf("%v: the token is not accepted; check --kubeconfig, or the pod's ServiceAccount", err)
	}
	return err.Error()
}
