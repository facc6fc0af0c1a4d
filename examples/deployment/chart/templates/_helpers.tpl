{{- define "inflight.name" -}}
{{- if contains "inflight" .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-inflight" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "inflight.selector" -}}
app.kubernetes.io/name: inflight
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "inflight.labels" -}}
{{ include "inflight.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "inflight.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "inflight.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end -}}

{{/* The root file system is read-only: sockets, the kernels' cache and logs are in /tmp. */}}
{{- define "inflight.env" -}}
- {name: XDG_RUNTIME_DIR, value: /tmp/run}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
- {name: XDG_STATE_HOME, value: /tmp/state}
- {name: HF_HOME, value: /models/huggingface}
{{- end -}}
